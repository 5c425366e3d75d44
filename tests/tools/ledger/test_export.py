"""`slipstream ledger export`."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet
import pytest

from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.reader import LedgerReader
from slipstream.buffer.store.redis import group_key, run_prefix
from slipstream.buffer.store.spill import SpillFolder
from slipstream.configs import RunConfig
from slipstream.models.folder import initial_model, text_decoder
from slipstream.tools.ledger import export
from tests.buffer.groups import trajectory
from tests.tools.conftest import CommandLine
from tests.tools.ledger.conftest import SOUND, TASKS, MakeRun, delivered, on, play, spill, start


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """In a folder of its own."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "groups.parquet"


def read(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
    return rows


def test_each_answer_is_a_row_with_all_its_facts(ledger: CommandLine, played: RunConfig, file: Path) -> None:
    assert ledger("export", played.paths.root, "--out", file) == 0
    assert f"{file}: 2 groups, 4 answers\n" in ledger.out
    order = task_order(TASKS, seed=played.run.seed, epoch=0)
    assert read(file) == [
        {
            "group_id": group_id,
            "task": order[position],
            "epoch": 0,
            "steps": [0],
            "answer": answer,
            "reward": reward,
            "finish_reason": "stop",
            "oldest_version": 0,
            "newest_version": 0,
            "score_exact_match": reward,
            "prompt_token_ids": [0, 1],
            "answer_token_ids": [2, 3],
            "answer_logprobs": [-0.5, -0.5],
            "answer_action_mask": [1, 1],
        }
        for position, group_id in enumerate(("1", "2"))
        for answer, reward in ((0, 1.0), (1, 0.0))
    ]


def test_texts_are_columns_where_the_tokenizer_is(ledger: CommandLine, played: RunConfig, file: Path) -> None:
    model = initial_model(played)
    assert ledger("export", played.paths.root, "--out", file) == 0
    decode = text_decoder(model)
    rows = read(file)
    assert rows
    for row in rows:
        assert row["prompt_text"] == decode(row["prompt_token_ids"])
        assert row["answer_text"] == decode(row["answer_token_ids"])


def test_other_states_are_exported_in_row_groups_and_not_marked(
    ledger: CommandLine, played: RunConfig, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "ROW_GROUP_TOKENS", 8)
    assert ledger("export", played.paths.root, "--out", file, "--state", "trained") == 0
    assert pyarrow.parquet.ParquetFile(file).num_row_groups == 2
    rows = [(row["group_id"], row["steps"], row["answer"]) for row in read(file)]
    assert rows == [(group_id, [1], answer) for group_id in ("3", "4") for answer in (0, 1)]
    assert len(ledger.out.splitlines()) == 1


def test_filtration_report_reads_the_file(ledger: CommandLine, make_run: MakeRun, file: Path) -> None:
    config = make_run()
    rng = np.random.default_rng(3)

    async def fill(_: object, opened: Ledger) -> None:
        for number, task in enumerate(await start(opened, config)):
            answers = []
            for episode, reward in enumerate(rng.uniform(-1, 1, 6)):
                true_score = float(reward > 0) if abs(reward) > 0.6 else float(rng.random() < 0.5)
                answer = trajectory(reward=float(reward))
                answers.append(msgspec.structs.replace(answer, episode=episode, scores={"exact_match": true_score}))
            await opened.deliver([delivered(config, task, answers)])
            if number % 2:
                assert await opened.lease(number // 2, consuming_version=0, count=2) is not None
                await opened.train(number // 2)
        await opened.durable(6)

    on(config, fill)
    assert ledger("export", config.paths.root, "--out", file) == 0
    assert ledger("filtration-report", file, "--true-score", "score_exact_match", "--bins", 0, "--json") == 0
    report = json.loads(ledger.out)
    assert (report["groups"], report["answers"]) == (12, 72)
    by_strategy = {row["strategy"]: row["r_squared"] for row in report["strategies"]}
    assert by_strategy["best_worst"] > by_strategy["none"], "only extreme rewards predict the true score"


def test_scores_of_removed_rewards_have_columns(ledger: CommandLine, make_run: MakeRun, file: Path) -> None:
    config = make_run()

    async def fill(_: object, opened: Ledger) -> None:
        answer = trajectory()
        old = msgspec.structs.replace(answer, scores={**answer.scores, "old": 0.25})
        tasks = await start(opened, config)
        await opened.deliver([delivered(config, tasks[0], [answer, answer]), delivered(config, tasks[1], [old, old])])

    on(config, fill)
    assert ledger("export", config.paths.root, "--out", file, "--state", "ready") == 0
    scores = [(row["score_exact_match"], row["score_old"]) for row in read(file)]
    assert scores == [(1.0, None)] * 2 + [(1.0, 0.25)] * 2


def test_spilled_groups_are_exported(ledger: CommandLine, played: RunConfig, file: Path) -> None:
    (spilled,) = spill(played)
    assert ledger("export", played.paths.root, "--out", file) == 0
    assert {row["group_id"] for row in read(file)} == {"1", "2"}
    spilled.unlink()
    other = file.with_name("other.parquet")
    assert ledger("export", played.paths.root, "--out", other) == 1
    assert spilled.name in ledger.err
    assert not other.exists()


def test_retention_waits_for_the_export(ledger: CommandLine, make_run: MakeRun, file: Path) -> None:
    config = make_run(retention={"max_groups": 0, "keep_until_exported": True})
    play(config)

    def remembered() -> list[str]:
        on(config, lambda _, opened: opened.trim())
        return on(
            config,
            lambda redis, _: LedgerReader(redis, config.run.name, SpillFolder(config.paths.spill)).ids("durable"),
        )

    assert remembered() == ["1", "2"]
    assert ledger("export", config.paths.root, "--out", file) == 0
    assert remembered() == []


def test_trim_forgets_exported_groups_only(ledger: CommandLine, played: RunConfig, file: Path) -> None:
    assert ledger("export", played.paths.root, "--out", file, "--trim") == 0
    assert len(read(file)) == 4
    assert ledger("show", played.paths.root, "1") == 1
    assert ledger("show", played.paths.root, "9") == 0
    assert ledger("verify", played.paths.root) == 0
    assert ledger.out.startswith(SOUND)


def test_new_skips_exported_groups(ledger: CommandLine, played: RunConfig, file: Path) -> None:
    assert ledger("export", played.paths.root, "--out", file) == 0
    on(played, lambda _, opened: opened.durable(2))
    second, third = file.with_name("second.parquet"), file.with_name("third.parquet")
    assert ledger("export", played.paths.root, "--out", second, "--new") == 0
    assert {row["group_id"] for row in read(second)} == {"3", "4"}
    assert ledger("export", played.paths.root, "--out", third, "--new") == 1
    assert not third.exists()


def test_only_durable_groups_are_marked(played: RunConfig) -> None:
    prefix = run_prefix(played.run.name)
    assert on(played, lambda _, opened: opened.exported(["1", "3", "99"], forget=False)) == 1
    assert on(played, lambda redis, _: redis.hget(f"{prefix}:about:3", "exported")) is None
    assert on(played, lambda redis, _: redis.exists(f"{prefix}:about:99")) == 0


def test_finished_run_is_exported_but_not_trimmed(ledger: CommandLine, crashed: RunConfig, file: Path) -> None:
    assert ledger("export", crashed.paths.root, "--out", file) == 0
    assert len(read(file)) == 4
    assert "nothing was marked" in ledger.out
    other = file.with_name("other.parquet")
    assert ledger("export", crashed.paths.root, "--out", other, "--trim") == 1
    assert "--trim" in ledger.err
    assert not other.exists()


def test_failed_export_is_named_and_leaves_the_files(ledger: CommandLine, make_run: MakeRun, file: Path) -> None:
    config = make_run()
    on(config, lambda _, opened: start(opened, config))
    assert ledger("export", config.paths.root, "--out", file) == 1
    assert "durable" in ledger.err
    assert list(file.parent.iterdir()) == []


def test_damaged_group_or_existing_file_is_named(ledger: CommandLine, played: RunConfig, file: Path) -> None:
    on(played, lambda redis, _: redis.set(group_key(played.run.name, "2"), b"damaged"))
    assert ledger("export", played.paths.root, "--out", file) == 1
    assert "group 2" in ledger.err
    assert list(file.parent.iterdir()) == []
    file.write_text("precious")
    assert ledger("export", played.paths.root, "--out", file) == 2
    assert str(file) in ledger.err
    assert file.read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "options", "code", "named"),
    [
        ("missing/groups.parquet", [], 2, "missing"),
        (f"{247 * 'g'}.parquet", [], 1, "File name too long"),  # for its temporary name
        ("groups.csv", [], 2, ".parquet"),
        ("groups", [], 2, ".parquet"),
        ("groups.parquet", ["--state", "ready", "--trim"], 2, "--trim"),
    ],
)
def test_invalid_output_is_refused(
    ledger: CommandLine, played: RunConfig, file: Path, name: str, options: list[str], code: int, named: str
) -> None:
    assert ledger("export", played.paths.root, "--out", file.parent / name, *options) == code
    assert named in ledger.err
    assert list(file.parent.iterdir()) == []


def test_missing_pyarrow_names_the_extra(
    ledger: CommandLine, played: RunConfig, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert ledger("export", played.paths.root, "--out", file) == 1
    assert "slipstream[export]" in ledger.err
