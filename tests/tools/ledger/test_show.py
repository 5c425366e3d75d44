"""`slipstream ledger show`."""

import re

import pytest

from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.store.keys import shard_prefix
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.types import EvalSlice, Facts
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from tests.buffer.groups import train_group
from tests.tools.ledger.conftest import MakeRun
from tests.tools.ledger.runs import SERVER, TASKS, CommandLine, delivered, on, play, start


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def rows(printed: str) -> list[list[str]]:
    """The cells of all tables."""
    return [
        [cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in printed.splitlines() if line[:1] in "│┃"
    ]


def test_a_group_is_told_from_its_ticket_to_its_checkpoint(ledger: CommandLine, played: RunConfig) -> None:
    assert ledger("show", "1", "--run", played.folder) == 0
    index = task_order(TASKS, seed=played.run.seed, epoch=0)[0]
    assert "group 1: durable" in ledger.out
    found = rows(ledger.out)
    for row in (
        ["task", f"epoch 0, position 0: index {index}"],
        ["server", SERVER],
        ["policy version", "0 when it was issued, 0 the oldest of its tokens"],
        ["answers", "2 of 2 tokens"],
        ["trained in", "step 0"],
        ["1", "2", "stop", "0: 2 to 3", "exact_match 1"],
        ["0", "2", "stop", "0: 2 to 3", "exact_match 0"],
    ):
        assert row in found
    events = [row for row in found if row[0].endswith("UTC")]
    assert [(state, detail) for _, _, state, detail in events] == [
        ("issued", f"to {SERVER}"),
        ("ready", "oldest version 0"),
        ("leased", "for step 0"),
        ("trained", "at step 0"),
        ("durable", "in the checkpoint of 1 steps"),
    ]
    assert events[0][1] == "+0.000 s"
    assert [row[0] for row in events] == sorted(row[0] for row in events)


def test_times_are_absolute_and_since_issue(ledger: CommandLine, played: RunConfig) -> None:
    key = f"{shard_prefix(played.run.name, 0)}:history:10"
    on(played, lambda redis, _: redis.delete(key))
    on(played, lambda redis, _: redis.rpush(key, "86399.250000 issued to r0", "90000.500000 ready oldest version 0"))
    assert ledger("show", "10", "--run", played.folder) == 0
    found = rows(ledger.out)
    assert ["1970-01-01 23:59:59.250 UTC", "+0.000 s", "issued", "to r0"] in found
    assert ["1970-01-02 01:00:00.500 UTC", "+3601.250 s", "ready", "oldest version 0"] in found


@pytest.mark.parametrize("columns", ["20", "80"])
def test_a_narrow_terminal_and_a_long_name_cut_off_nothing(
    ledger: CommandLine, played: RunConfig, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    server = "rollout-pod-" + "0123456789" * 8
    key = f"{shard_prefix(played.run.name, 0)}:history:10"
    on(played, lambda redis, _: redis.delete(key))
    on(played, lambda redis, _: redis.rpush(key, f"86399.250000 issued to {server}"))
    assert ledger("show", "10", "--run", played.folder) == 0
    assert "1970-01-01 23:59:59.250 UTC" in ledger.out
    assert server in "".join(row[-1] for row in rows(ledger.out))
    assert ledger("show", "--run", played.folder) == 0
    assert "…" not in ledger.out


def test_a_group_that_came_to_nothing_says_why(ledger: CommandLine, played: RunConfig) -> None:
    assert ledger("show", "9", "--run", played.folder) == 0
    assert "group 9: filtered" in ledger.out
    assert rows(ledger.out)[-1][2:] == ["filtered", "reward_error"]


def test_an_evaluation_shows_its_answers(ledger: CommandLine, played: RunConfig) -> None:
    async def evaluate(_: object, opened: Ledger) -> str:
        await opened.publish(0, evaluate=True)
        await opened.evaluate(0, server=SERVER, eval_tasks=1)
        blob = encode(train_group("e0-0", index=7))
        return await opened.evaluated(EvalSlice("e0-0", 0, 1), version=0, answered=1, score_sum=1.0, blob=blob)

    assert on(played, evaluate) == "evaluated"
    assert ledger("show", "e0-0", "--run", played.folder) == 0
    assert "2 answers to task 7" in ledger.out


@pytest.mark.parametrize("group_id", ["13", "0", "nonsense", "e9-0"])
def test_a_group_that_never_was_is_an_error(ledger: CommandLine, played: RunConfig, group_id: str) -> None:
    assert ledger("show", group_id, "--run", played.folder) == 1
    assert f"has no group '{group_id}'" in ledger.err


def test_a_run_in_the_place_of_a_group_is_told_where_it_belongs(
    ledger: CommandLine, played: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(played.folder.parent.parent)
    for run in (played.folder, f"runs/{played.run.name}", played.run.name):
        assert ledger("show", run) == 2
        assert f"'{run}' is no group's id; name a run with --run {run}" in ledger.err
        assert ledger("show", "--run", run) == 0


@pytest.mark.parametrize("shards", [1, 2])
def test_a_forgotten_group_is_told_from_one_that_never_was(ledger: CommandLine, make_run: MakeRun, shards: int) -> None:
    config = make_run(retention={"max_groups": 0}, shards=shards)
    on(config, lambda redis, opened: play(redis, opened, config))
    on(config, lambda _, opened: opened.sweep(silent_s=None))
    assert ledger("show", "2", "--run", config.folder) == 1
    assert "group 2 of run" in ledger.err
    assert "is forgotten: buffer.retention" in ledger.err


def test_the_report_counts_states_reasons_lengths_and_outcomes(ledger: CommandLine, make_run: MakeRun) -> None:
    config = make_run(filters=[{"name": "dynamic_sampling"}])

    async def drop(_: object, opened: Ledger) -> None:
        tasks = await start(opened, config)
        await opened.deliver([delivered(config, task) for task in tasks[:2]])
        assert await opened.lease(0, consuming_version=0, count=2) is not None
        await opened.train(0)
        facts = Facts(tokens=8, delivered={4: 2}, dropped={"dynamic_sampling": {4: 2}}, task=3, outcome="solved")
        await opened.filter(tasks[2].id, reason="dynamic_sampling", facts=facts)

    on(config, drop)
    assert ledger("show", "--run", config.folder) == 0
    found = rows(ledger.out)
    for row in (
        ["issued", "9", "12 11 10 9 8"],
        ["trained", "2", "2 1"],
        ["filtered", "1", "3"],
        ["filtered:dynamic_sampling", "1"],
        # Of six answers four have 2 tokens and two have 4: the trained ones are all short, the dropped all long.
        ["trained", "", "0.333"],
        ["dropped: dynamic_sampling", "2", "0.667"],
        ["mixed", "2", "67%"],
        ["solved", "1", "33%"],
    ):
        assert row in found
    assert f"run {config.run.name}: 12 groups" in ledger.out


def test_names_of_peers_are_shown_without_control_characters(ledger: CommandLine, played: RunConfig) -> None:
    key = f"{shard_prefix(played.run.name, 0)}:about:10"
    on(played, lambda redis, _: redis.hset(key, "server", "\x1b[2J[bold]r9"))
    assert ledger("show", "10", "--run", played.folder) == 0
    assert ["server", "\\x1b[2J[bold]r9"] in rows(ledger.out)
