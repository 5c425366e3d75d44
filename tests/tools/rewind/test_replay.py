"""Replays of real runs: with the same settings they give the same weights, bit for bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.tools.rewind.recording import Recording
from slipstream.tools.rewind.replay import replay
from slipstream.tools.rewind.session import ReplayedStep
from tests.tools.conftest import CommandLine
from tests.tools.rewind.recorded_run import make_config, record_run

STEPS = 6
CRITIC = {"advantage": "gae", "critic": {"optimizer": {"lr": 3e-3, "warmup_steps": 0}}, "updates_per_step": 2}
PRIME = {"advantage": "prime", "process_reward": {"optimizer": {"lr": 3e-3, "warmup_steps": 0}}}
KL = {"kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1", "target": 0.01, "horizon": 8}}
THROTTLE = {"throttle": {"max_kl": 1e-9, "hold_steps": 0, "learning_rate": True}}
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"learner": THROTTLE},
    "ppo": {"learner": CRITIC | KL},
    "lora": {"model": {"lora": {"rank": 4, "alpha": 16}}, "learner": PRIME},
}
"""Settings of each run, by section. The learner of `grpo` crashes in the fifth step."""


@pytest.fixture(scope="module")
def runs(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunPaths]:
    """The folders of finished runs."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: record_run(make_config(folder, redis_url, name, **sections), crash_after=5 if name == "grpo" else None)
        for name, sections in RUNS.items()
    }


@pytest.fixture
def copied(runs: dict[str, RunPaths], tmp_path: Path) -> RunPaths:
    """A copy of the first run's folder, without its ledger."""
    return RunPaths(shutil.copytree(runs["grpo"].root, tmp_path / "copied"))


@pytest.mark.parametrize("name", RUNS)
def test_same_settings_give_same_weights(name: str, runs: dict[str, RunPaths]) -> None:
    require_same_weights(runs[name])


@pytest.mark.soak
def test_two_ranks_give_same_weights(redis_url: str, tmp_path: Path) -> None:
    require_same_weights(record_run(make_config(tmp_path, redis_url, "ranks"), ranks=2))


def require_same_weights(run: RunPaths) -> None:
    with Recording.open(run.root) as recording:
        assert recording.checkpoints == [0, 3, STEPS]
        assert recording.replayable == [range(1, STEPS + 1)]
        steps = replay(recording, 1, STEPS)
        assert [step.step for step in steps] == [*range(1, STEPS + 1)]
        for step in steps:
            assert step.equal
            compared = step.metrics.keys() - {"skipped_updates"}
            assert {key: step.metrics[key] for key in compared} == {key: step.recorded[key] for key in compared}
        assert len({step.checksum for step in steps}) == STEPS


def test_restart_undoes_records(runs: dict[str, RunPaths]) -> None:
    lines = [json.loads(line) for line in runs["grpo"].steps.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6]
    with Recording.open(runs["grpo"].root) as recording:
        assert [recording.steps[step].start.step for step in range(1, STEPS + 1)] == [0, 0, 0, 3, 3, 3]
        assert {recording.steps[step].record.lr_scale for step in recording.steps} > {1.0}, "the throttle moved"


def test_replays_of_one_recording_are_independent(copied: RunPaths) -> None:
    with Recording.open(copied.root) as recording:
        changes: list[dict[str, Any]] = [
            {},
            {"overrides": ["learner.loss.clip_low=0.01", "learner.loss.clip_high=0.01", "learner.updates_per_step=2"]},
            {"overrides": ["learner.optimizer.lr=1e-4"]},
            {"leave_out": {(recording.steps[5].record.groups[0], None)}},
            {"leave_out": {(recording.steps[5].record.groups[0], 1), (recording.steps[5].record.groups[1], 0)}},
            {},
        ]
        seen = list[ReplayedStep]()
        results = [replay(recording, 5, 6, on_step=seen.append, **change) for change in changes]
        assert seen == [step for steps in results for step in steps]
        assert [[step.equal for step in steps] for steps in results] == [[True] * 2, *[[False] * 2] * 4, [True] * 2]
        assert len({steps[-1].checksum for steps in results}) == len(changes) - 1
        assert [steps[0].metrics["answers"] for steps in results] == [16, 16, 16, 12, 14, 16]
        with pytest.raises(SlipstreamError, match="nothing is left"):
            replay(recording, 5, 5, leave_out={(group_id, None) for group_id in recording.steps[5].record.groups})


@pytest.mark.parametrize(
    ("overrides", "equal", "code"), [((), True, 0), (("learner.optimizer.lr=1e-5",), False, 0)], ids=["same", "other"]
)
def test_command_reports_both_sides(
    overrides: tuple[str, ...], equal: bool, code: int, copied: RunPaths, cli: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "replay.json"
    assert cli("replay", copied.root, "--step", 4, *overrides, "--to", 5, "--json", file) == code
    assert ("grad_norm" in cli.out) == (not equal)
    content = json.loads(file.read_text())
    assert (content["equal"], content["first_difference"]) == (equal, None if equal else 4)
    assert [step["step"] for step in content["steps"]] == [4, 5]
    assert content["steps"][0]["metrics"]["reward"] == content["steps"][0]["recorded"]["reward"]


def test_other_weights_with_same_settings_are_an_error(copied: RunPaths, cli: CommandLine) -> None:
    lines = [json.loads(line) for line in copied.steps.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "start":
            line["surroundings"]["versions"]["torch"] = "1.0"
        elif line["step"] == 5:
            line["checksum"] = "0" * 16
    copied.steps.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert cli("replay", copied.root, "--step", 4, "--to", 6) == 1
    assert "from step 5 on" in cli.out
    assert "torch: 1.0 then" in cli.out


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--step", 7), 1, "1 to 6"),
        (("--step", 5, "--to", 4), 2, "--to 4"),
        (("--step", 5, "buffer.max_staleness=3"), 2, "buffer.max_staleness"),
        (("--step", 5, "learner.throttle.max_kl=3"), 2, "learner.throttle.max_kl"),
        (("--step", 5, "learner.loss.nome=3"), 2, "learner.loss.nome"),
        (("--step", 5, "learner.advantage=gae"), 2, "learner.critic"),
    ],
)  # fmt: skip
def test_impossible_replays_name_the_reason(
    arguments: tuple[object, ...], code: int, named: str, copied: RunPaths, cli: CommandLine
) -> None:
    assert cli("replay", copied.root, *arguments) == code
    assert named in cli.err


def test_missing_groups_and_changed_checkpoints_are_named(copied: RunPaths, cli: CommandLine) -> None:
    for file in copied.kept_groups.glob("step-000000002-*"):
        file.unlink()
    assert cli("replay", copied.root, "--step", 2) == 1
    assert "buffer.keep_trained" in cli.err
    assert cli("replay", copied.root, "--step", 4) == 0
    damaged = next(copied.kept_groups.glob("step-000000004-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert cli("replay", copied.root, "--step", 4) == 1
    assert damaged.name in cli.err
    shutil.rmtree(copied.checkpoints / "step-000003")
    (copied.checkpoints / "step-000006").rename(copied.checkpoints / "step-000003")
    assert cli("replay", copied.root, "--step", 5) == 1
    assert "step 3" in cli.err
