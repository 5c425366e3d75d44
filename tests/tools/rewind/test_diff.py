"""`slipstream diff`: settings, versions, data and metrics of two runs, and the cause that it names."""

import asyncio
import json
import math
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import connect_async
from slipstream.configs import RunConfig
from slipstream.configs.load import create_run_folder
from slipstream.configs.paths import LEARNER, RunPaths, hold_run_lock
from slipstream.tools.rewind.series import Restart, Series, find_restarts, first_difference, is_timed, parting
from slipstream.tools.rewind.settings import EFFECTS, differences
from tests.conftest import free_port
from tests.packaging.test_docs import exists
from tests.tools.conftest import CommandLine
from tests.tools.run_command import demo_config

STEPS = 200
Record = dict[str, Any]


def noisy(seed: int, of: Callable[[int], float] = lambda step: 0.0, *, deviation: float = 0.1) -> Series:
    """A series of normal noise about a function of the step."""
    rng = random.Random(seed)
    return {step: of(step) + rng.gauss(0, deviation) for step in range(1, STEPS + 1)}


# --- series -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trend", [lambda step: 0.0, lambda step: step / 50, lambda step: math.tanh((step - 100) / 30)])
def test_noise_about_one_trend_does_not_part(trend: Callable[[int], float]) -> None:
    pairs = [(noisy(2 * seed, trend), noisy(2 * seed + 1, trend)) for seed in range(50)]
    assert [parting(a, b) for a, b in pairs] == [None] * 50
    assert {first_difference(a, b) for a, b in pairs} == {1}


@pytest.mark.parametrize(
    ("other", "earliest", "latest"),
    [
        (lambda step: 0.5 * (step > 120), 121, 140),
        (lambda step: -max(0, step - 100) / 50, 101, 130),
        (lambda step: math.nan if step >= 77 else 0.0, 77, 77),
    ],
)
def test_parting_is_found_near_its_step(other: Callable[[int], float], earliest: int, latest: int) -> None:
    found = parting(noisy(0), noisy(1, other))
    assert found is not None
    assert earliest <= found.last
    assert found.first <= latest
    assert parting(noisy(1, other), noisy(0)) is not None


def test_spikes_and_few_steps_are_not_called_a_parting() -> None:
    rare = {step: 1.0 if step == 60 else 0.0 for step in range(1, STEPS + 1)}
    assert parting(rare, dict.fromkeys(range(1, STEPS + 1), 0.0)) is None
    assert parting({1: 0.0, 2: 0.0, 3: 0.0}, {1: 9.0, 2: 9.0, 3: 9.0}) is None
    assert first_difference({1: 0.0, 2: math.nan}, {1: 0.0, 2: math.nan, 3: 1.0}) is None


def test_restart_is_seen_by_a_repeated_step_or_by_the_clock() -> None:
    def records(*places: tuple[int, float]) -> list[Record]:
        return [{"step": step, "time_s": time_s} for step, time_s in places]

    assert find_restarts(records((1, 1.0), (2, 2.0), (3, 3.0))) == []
    assert find_restarts(records((1, 1.0), (2, 2.0), (2, 0.5), (3, 9.0))) == [Restart(2, repeated=1)]
    assert find_restarts(records((1, 5.0), (2, 0.5))) == [Restart(2, repeated=0)]


def test_metrics_of_time_and_place_are_left_out() -> None:
    timed = {"step_s", "buffer/ready", "policy_version", "tokens_generated_per_s", "weights/members", "time_s"}
    trained = {"reward", "entropy", "score/exact", "lr", "grad_norm", "staleness_mean", "masked/veto"}
    assert {name for name in timed | trained if is_timed(name)} == timed


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_that_act_on_training_come_first(tmp_path: Path) -> None:
    reward = "rewards=[{name: exact_match, weight: 0.5}]"
    a = demo_config(tmp_path, reward, "env.options={url: 'http://me:secret@host'}")
    b = demo_config(
        tmp_path, reward.replace("0.5", "2"), "run.name=b", "learner.optimizer.lr=0.1", "rollout.servers=3",
        "learner.advantage={name: rloo}", "env.options={url: 'http://me:secret2@host'}",
    )  # fmt: skip
    found = {one.key: one for one in differences(a, b)}
    assert list(found)[:3] == ["learner.optimizer.lr", "learner.advantage.name", "rewards.exact_match.weight"]
    assert found["rewards.exact_match.weight"].b == 2
    assert found["learner.optimizer.lr"].default == 1e-6
    assert [one.key for one in found.values() if one.is_timing] == ["rollout.servers"]
    assert {one.key for one in found.values() if not one.acts_on} == {"run.name"}
    assert "secret" not in str(found)
    assert differences(a, a) == []


def test_ports_differ_only_where_they_were_set(tmp_path: Path) -> None:
    a, b = (demo_config(tmp_path, f"run.port_base={base}") for base in (20000, 30000))
    assert a.redis.port != b.redis.port
    assert differences(a, b) == []
    assert differences(a, demo_config(tmp_path)) == []
    by_hand = demo_config(tmp_path, "run.port_base=30000", "weights.store_port=40000")
    assert [(one.key, one.a, one.b) for one in differences(a, by_hand)] == [("weights.store_port", 20003, 40000)]


def test_settings_with_effects_exist() -> None:
    assert [prefix for prefix in EFFECTS if not exists(prefix)] == []


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Makes the folder of a run without a ledger, with metrics of STEPS steps."""

    def make(name: str, *overrides: str, seed: int = 0, metrics: Mapping[str, Series] | None = None) -> Path:
        config = demo_config(tmp_path, f"run.name={name}", f"redis.port={free_port()}", *overrides)
        create_run_folder(config.paths, config)
        series = {"reward": noisy(seed), "entropy": noisy(seed + 100), "staleness_mean": noisy(9), **(metrics or {})}
        with config.paths.metrics.open("w") as file:
            for step in range(1, STEPS + 1):
                values = {key: None if math.isnan(of[step]) else of[step] for key, of in series.items() if step in of}
                file.write(json.dumps({"kind": "step", "time_s": float(step), "step": step, **values}) + "\n")
        return config.paths.root

    return make


def diff(cli: CommandLine, a: Path, b: Path) -> dict[str, Any]:
    assert cli("diff", a, b, "--json") == 0, cli.err
    found: dict[str, Any] = json.loads(cli.out)
    assert cli("diff", a, b) == 0
    for cause in found["causes"]:
        assert cause in cli.out
    return found


def test_setting_that_acts_on_what_parts_is_the_cause(cli: CommandLine, make: Callable[..., Path]) -> None:
    lr = {1: dict.fromkeys(range(1, STEPS + 1), 0.1), 0: dict.fromkeys(range(1, STEPS + 1), 0.01)}
    collapse = noisy(7, lambda step: -float(step > 100))
    a = make("a", metrics={"lr": lr[0]})
    b = make("b", "learner.optimizer.lr=0.1", "rollout.servers=2", seed=3, metrics={"lr": lr[1], "entropy": collapse})
    found = diff(cli, a, b)
    assert [one["key"] for one in found["settings"]][:2] == ["learner.optimizer.lr", "rollout.servers"]
    assert [(one["name"], one["differs_at"]) for one in found["metrics"]][:2] == [("lr", 1), ("entropy", 1)]
    assert 91 <= found["metrics"][1]["parting"]["first"] <= 121
    assert found["metrics"][2]["parting"] is None
    (cause,) = found["causes"]
    assert "learner.optimizer.lr" in cause
    assert found["versions"] is None
    assert found["data"] is None


def test_cause_without_settings_is_looked_for_in_the_course(cli: CommandLine, make: Callable[..., Path]) -> None:
    shifted = noisy(7, lambda step: float(step > 150))
    a, b = (
        make("a"),
        make("b", seed=3, metrics={"reward": shifted, "staleness_mean": noisy(8, lambda step: float(step > 100))}),
    )
    lines = (b / "metrics.jsonl").read_text().splitlines(keepends=True)
    again = [json.dumps(json.loads(line) | {"time_s": 0.1}) + "\n" for line in lines[90:]]
    (b / "metrics.jsonl").write_text("".join([*lines[:95], '{"kind": "ste\n', *again, '{"kind": "finish"}\n']))
    for folder, packages in ((a, {"torch": "2.13.0"}), (b, {"torch": "2.12.0"})):
        (folder / "run.json").write_text(json.dumps([{}, {"started_at": str(folder), "packages": packages}]))
        steps = [{"step": 1, "groups": ["1"]}, {"step": 2, "groups": ["2" if folder == a else "3"]}]
        (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    with hold_run_lock(RunPaths(a), by=LEARNER):
        found = diff(cli, a, b)
    assert [found["runs"][side]["state"] for side in "ab"] == ["running", "finished"]
    assert found["runs"]["b"]["restarts"] == [{"step": 91, "repeated": 5}]
    assert found["runs"]["b"]["steps"] == STEPS
    assert found["versions"] == [{"key": "packages.torch", "a": "2.13.0", "b": "2.12.0"}]
    assert found["other_groups_at"] == 2
    subjects = ["staleness_mean", "restarted at step 91", "packages.torch", "other groups from step 2"]
    assert all(any(subject in cause for cause in found["causes"]) for subject in subjects)


def test_equal_runs_and_too_short_ones(cli: CommandLine, make: Callable[..., Path], tmp_path: Path) -> None:
    a = make("a")
    shutil.copytree(a, tmp_path / "copy")
    found = diff(cli, a, tmp_path / "copy")
    assert (found["settings"], found["metrics"], len(found["causes"])) == ([], [], 1)
    assert found["runs"]["a"]["state"] == "stopped"
    (tmp_path / "copy" / "metrics.jsonl").unlink()
    assert diff(cli, a, tmp_path / "copy")["common_steps"] == 0
    assert cli("diff", a, tmp_path / "absent") == 2
    assert "absent" in cli.err


def test_damaged_lines_cost_themselves_and_names_are_escaped(cli: CommandLine, make: Callable[..., Path]) -> None:
    a, b = (make(name, metrics={"\x1b[31mred": noisy(seed)}) for name, seed in (("a", 4), ("b", 5)))
    lines = [
        "null", "[1]", '{"kind": "eval", "policy_version": [1], "score": 1}', '{"kind": "step", "step": "x"}',
        '{"kind": "step", "step": 201, "time_s": 201, "reward": ' + "9" * 400 + "}",
    ]  # fmt: skip
    for folder in (a, b):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))
        (folder / "steps.jsonl").write_text('{"step": "x", "groups": 5}\n{"step": 1, "groups": ["1"]}\n')
    found = diff(cli, a, b)
    assert [one["name"] for one in found["metrics"]] == ["\x1b[31mred"]
    assert found["other_groups_at"] is None
    assert "[31mred" in cli.out
    assert "\x1b" not in cli.out


def test_data_is_compared_by_the_ledgers_identities(
    cli: CommandLine, redis_url: str, run_name: str, tmp_path: Path
) -> None:
    folders = []
    for name, fingerprint in (("a", "x"), ("b", "y")):
        run = {"name": f"{run_name}-{name}", "dir": str(tmp_path)}
        config = RunConfig.model_validate({"run": run, "model": {"build": "digits"}, "redis": {"url": redis_url}})
        create_run_folder(config.paths, config)
        folders.append(config.paths.root)

        async def identify(config: RunConfig = config, fingerprint: str = fingerprint) -> None:
            async with connect_async(config.redis) as client:
                await Ledger(client, config).identify({"env_fingerprint": fingerprint, "train_tasks": "20"})

        asyncio.run(identify())
    assert diff(cli, *folders)["data"] == [{"key": "env_fingerprint", "a": "x", "b": "y"}]
