"""`slipstream bisect`: poisoned groups are found by replays without them; a learning rate is no group's fault."""

import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipstream.tools.rewind import bisect
from slipstream.tools.rewind.replay import replay
from slipstream.tools.rewind.search import most_tests, smallest
from slipstream.tools.rewind.series import Condition, crossing, jump
from tests.tools.conftest import CommandLine
from tests.tools.rewind.made_run import MadeRun, Poison, flipped, garbage
from tests.tools.run_command import demo_config

UNPROTECTED = (
    "learner.advantage=dr_grpo", "learner.correction={proximal: behaviour, weight: none, cap: null}",
    "learner.optimizer.clip_norm=1e9", "learner.loss.entropy_bonus=0",
)  # fmt: skip
"""Settings under which one group can do harm: no normalised advantages, no caps of ratios, no clipped gradients."""
heavy = pytest.mark.skipif("SLIPSTREAM_REWIND_CHECK" not in os.environ, reason="takes minutes: make rewind-check")


# --- the search -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 7, 80, 1000])
def test_single_cause_is_found_with_few_tests(parts: int) -> None:
    for cause in {0, parts // 3, parts - 1}:
        tested: list[frozenset[int]] = []
        assert smallest(range(parts), partial(_restores, {cause}, tested), most=4) == frozenset({cause})
        assert len(tested) <= most_tests(parts)
        assert all(len(removed) < parts for removed in tested) or parts == 1


@pytest.mark.parametrize("causes", [{3, 4}, {0, 63}, {5, 20, 41}, {1, 17, 33, 34}])
def test_several_causes_are_found_together(causes: set[int]) -> None:
    tested: list[frozenset[int]] = []
    assert smallest(range(64), partial(_restores, causes, tested), most=4) == frozenset(causes)
    assert len(tested) < 64


@pytest.mark.parametrize("restores", [lambda removed: False, lambda removed: len(removed) >= 10])
def test_no_small_cause_is_made_up(restores: Callable[[frozenset[int]], bool]) -> None:
    assert smallest(range(64), restores, most=4) is None


def _restores(causes: set[int], tested: list[frozenset[int]], removed: frozenset[int]) -> bool:
    tested.append(removed)
    return causes <= removed


def test_crossing_needs_steps_in_a_row() -> None:
    values = {step: 0.0 if step in (4, 8, 9, 10, 15) else 1.0 for step in range(1, 16)}
    below = Condition(below=0.5)
    assert [crossing(values, below, confirm=confirm) for confirm in (1, 2, 3)] == [4, 8, 8]
    assert crossing(values, below, confirm=4) == 15, "the run ended by it"
    assert crossing(values, Condition(above=2.0), confirm=1) is None
    assert crossing({**values, 3: math.nan}, Condition(), confirm=1) == 3


def test_jump_is_measured_against_the_steps_before() -> None:
    values = {step: 1.0 + 0.01 * (step % 3) for step in range(1, 40)}
    quiet = jump(values, 10, 39)
    found = jump({**values, 30: 2.0}, 10, 39)
    assert quiet is not None and quiet.deviations < bisect.JUMP
    assert found is not None
    assert (found.step, found.value, found.usual) == (30, 2.0, 1.01)
    assert found.deviations > bisect.JUMP


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def make(redis_url: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., MadeRun]:
    """Makes and trains a run of the demo's task."""

    def make(*overrides: str, steps: int, seed: int = 0, poison: Mapping[int, Poison] | None = None) -> MadeRun:
        config = demo_config(
            tmp_path, f"run.name={run_name}", f"redis.url={redis_url}", f"run.seed={seed}", f"learner.steps={steps}",
            "learner.groups_per_step=8", "learner.optimizer={lr: 0.003, warmup_steps: 0, final_lr_fraction: 1}",
            "weights.publish_every_steps=1", *overrides,
        )  # fmt: skip
        run = MadeRun(config, poison or {})
        run.train()
        capsys.readouterr()  # its log
        return run

    return make


def bisected(cli: CommandLine, run: MadeRun, *words: str) -> dict[str, Any]:
    assert cli("bisect", run.folder, "--json", *words) == 0, cli.err
    found: dict[str, Any] = json.loads(cli.out)
    assert "replay 2:" in cli.err, "the progress"
    return found


def test_poisoned_group_is_found_and_shown(
    cli: CommandLine, make: Callable[..., MadeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("learner.groups_per_step=4", "rollout.group_size=4", *UNPROTECTED, steps=8, poison={7: garbage})
    before = sorted(path.name for path in run.folder.iterdir())
    words = ("--metric", "grad_norm", "--above", "10", "--confirm", "1", "--window", "3")
    assert cli("bisect", run.folder, *words) == 0, cli.err
    (poisoned,) = run.poisoned
    assert f"group {poisoned} (step 7) is the cause" in cli.out
    assert f"=== group {poisoned}, answer" in cli.out
    assert "action (3 tokens, version 6)" in cli.out
    assert sorted(path.name for path in run.folder.iterdir()) == before, "the run is only read"

    for wrong, code, named in (
        (("--metric", "entropi", "--below", "1"), 2, "entropy"),
        (("--metric", "entropy", "--below", "0.1"), 1, "never below 0.1"),
        (("--metric", "grad_norm", "--above", "10"), 1, "--confirm"),
        (("--metric", "loss", "--nan"), 1, "not finite"),
        (("--metric", "loss", "--above", "1", "--step", "99"), 1, "1 to 8"),
    ):
        assert cli("bisect", run.folder, *wrong) == code
        assert named in cli.err

    calls = 0

    def interrupted(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return replay(*given, **named)

    monkeypatch.setattr("slipstream.tools.rewind.bisect.replay", interrupted)
    assert cli("bisect", run.folder, *words) == 130
    assert "interrupted after 4 replays" in cli.out.splitlines()[-1]


def test_steps_of_one_group_get_the_learning_rate_tried(cli: CommandLine, make: Callable[..., MadeRun]) -> None:
    run = make("learner.groups_per_step=1", "rollout.group_size=4", *UNPROTECTED, steps=4, poison={3: garbage})
    words = ("--metric", "grad_norm", "--above", "10", "--confirm", "1", "--window", "2")
    found = bisected(cli, run, *words)
    assert (found["groups"], found["replays"]) == ([], 2)
    assert "groups_per_step" in found["verdict"]
    assert found["lr_effect"] is not None


@heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("poison", "words"),
    [
        (garbage, ("--metric", "grad_norm", "--above", "10", "--confirm", "1")),
        (flipped, ("--metric", "reward", "--below", "0", "--confirm", "1")),
    ],
)
def test_poisoned_group_is_top_of_all(
    cli: CommandLine, make: Callable[..., MadeRun], seed: int, poison: Poison, words: tuple[str, ...]
) -> None:
    run = make(*UNPROTECTED, steps=12, seed=seed, poison={10: poison})
    found = bisected(cli, run, *words, "--window", "5")
    assert [each["group"] for each in found["groups"]] == run.poisoned
    (top,) = found["groups"]
    assert top["effect"] > 0.8
    assert (top["ratio"] > 100) == (poison is garbage)
    assert {answer["staleness"] for answer in top["answers"]} == {0}
    assert max(other["effect"] for other in found["others"]) < bisect.RESTORED


@heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_high_learning_rate_is_no_groups_fault(cli: CommandLine, make: Callable[..., MadeRun], seed: int) -> None:
    run = make(*UNPROTECTED, "learner.optimizer.lr=0.1", "learner.optimizer.clip_norm=1", steps=16, seed=seed)
    found = bisected(cli, run, "--metric", "entropy", "--below", "0.1")
    assert found["groups"] == []
    assert found["lr_effect"] > 0.5
    assert "learning rate" in found["verdict"]
