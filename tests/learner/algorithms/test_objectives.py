"""Every objective through the real trainer: it steps, and nothing depends on how a step is cut up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.schema.algorithms import Aggregation
from slipstream.learner.parallel.mesh import World
from tests.learner.recorded import build_trainer, train

MakeConfig = Callable[..., RunConfig]

CORRECTIONS: list[dict[str, Any]] = [
    {"proximal": "behaviour"},
    {"proximal": "interpolate"},
    {"weight": "sequence"},
    {"weight": "none"},
    {"band": [0.5, 2.0]},
    {"normalise": True},
    {"rejections": [{"level": "sequence_mean", "estimator": "k3", "high": 0.5}]},
    {"rejections": [{"level": "token", "estimator": "k1", "high": 1.5}]},
    {"second_moment": 0.04},
    {"veto": 1e-3},
]

REJECTING = {"rejections", "second_moment", "veto"}


def both_cuts(world: World, make_config: MakeConfig, groups: Path, **learner: Any) -> list[list[dict[str, float]]]:
    """Two steps in many small micro-batches, and in one each."""
    return [
        train(build_trainer(make_config(token_budget=budget, **learner), world), groups, range(2))
        for budget in (40, 4000)
    ]


@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_no_aggregation_depends_on_the_micro_batches(
    mode: str, world: World, make_config: MakeConfig, groups: Path
) -> None:
    loss: dict[str, Any] = {"aggregation": mode, "entropy_bonus": 0.01}
    if mode == "constant":
        loss["constant"] = 64.0
    one, other = both_cuts(world, make_config, groups, loss=loss, kl={"coefficient": 0.1})
    assert one[0]["grad_norm"] > 0
    for mine, theirs in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4, rel=1e-3)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_no_correction_depends_on_the_micro_batches(
    correction: dict[str, Any], world: World, make_config: MakeConfig, groups: Path
) -> None:
    one, other = both_cuts(world, make_config, groups, correction=correction)
    assert one[0]["grad_norm"] > 0
    for mine, theirs in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4, rel=1e-3)


@pytest.mark.parametrize("correction", [each for each in CORRECTIONS if each.keys() & REJECTING], ids=str)
def test_what_a_correction_rejects_is_in_the_figures(
    correction: dict[str, Any], world: World, make_config: MakeConfig, groups: Path
) -> None:
    (figures,) = train(build_trainer(make_config(correction=correction), world), groups, [0])
    assert 0 < figures["masked_fraction"] < 1
    (by_reason,) = [value for name, value in figures.items() if name.startswith("masked/")]
    assert by_reason == pytest.approx(figures["masked_fraction"])


def test_a_step_of_which_everything_is_rejected_changes_nothing_and_is_no_nan(
    world: World, make_config: MakeConfig, groups: Path
) -> None:
    correction = {"rejections": [{"level": "token", "estimator": "k3", "high": 1e-12}]}
    (figures,) = train(build_trainer(make_config(correction=correction), world), groups, [0])
    assert (figures["masked_fraction"], figures["loss"], figures["grad_norm"]) == (1.0, 0.0, 0.0)
