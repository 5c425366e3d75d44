"""The off-policy correction: settings, importance weights, rejections, and the interpolated proximal policy."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from slipstream.configs.schema.learner import CorrectionConfig, RejectionConfig
from slipstream.learner.algorithms.advantages.base import one_rank
from slipstream.learner.algorithms.correction import correct, interpolate, lag_in_steps, outliers, rejected, vetoed
from tests.learner.algorithms.golden import golden_log_ratio
from tests.learner.algorithms.ranks import on_two_ranks

EVERYTHING = {
    "normalise": True, "rejections": [{"level": "sequence_max", "estimator": "k2", "high": 0.2}], "second_moment": 0.03,
    "veto": 0.5,
}  # fmt: skip


def config(**keys: Any) -> CorrectionConfig:
    return CorrectionConfig.model_validate(keys)


# --- importance weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "weights", "truncated"),
    [
        ({"weight": "none"}, [1.0, 1.0, 1.0], [0, 0, 0]), ({"cap": 2.0}, [2.0, 0.5, 1.0], [1, 0, 0]),
        ({"cap": None}, [4.0, 0.5, 1.0], [0, 0, 0]), ({"band": (0.75, 2.0)}, [0.0, 0.0, 1.0], [1, 1, 0]),
        ({"weight": "sequence", "cap": 1.5}, [1.5, 1.5, 1.5], [1, 1, 1]),
        ({"cap": None, "normalise": True}, [4.0 / (5.5 / 3), 0.5 / (5.5 / 3), 1.0 / (5.5 / 3)], [0, 0, 0]),
    ],
)  # fmt: skip
def test_weights_are_truncated_ratios(keys: dict[str, Any], weights: list[float], truncated: list[float]) -> None:
    correction = correct(
        torch.tensor([[4.0, 0.5, 1.0, 9.0]]).log(), torch.tensor([[1.0, 1.0, 1.0, 0.0]]), config(**keys)
    )
    torch.testing.assert_close(correction.importance_weights_BT, torch.tensor([[*weights, 0.0]]))
    assert correction.truncated_BT.tolist() == [[*truncated, 0]]


def test_sequence_weights_have_mean_1_over_trajectories() -> None:
    log_ratio_BT = torch.tensor([[3.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).clamp(min=1e-3).log()
    mask_BT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    correction = correct(log_ratio_BT, mask_BT, config(weight="sequence", cap=None, normalise=True))
    torch.testing.assert_close(correction.importance_weights_BT, torch.tensor([[1.5] * 3, [0.5, 0.0, 0.0], [0.0] * 3]))


def test_weights_have_mean_1_over_kept_actions() -> None:
    log_ratio_BT, mask_BT = golden_log_ratio()
    correction = correct(log_ratio_BT, mask_BT, config(**EVERYTHING))
    assert 0 < correction.mask_BT.sum() < mask_BT.sum()
    assert float(correction.importance_weights_BT.sum() / correction.mask_BT.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_huge_log_ratio_does_not_overflow(weight: str) -> None:
    log_ratio_BT, mask_BT = torch.tensor([[1e4, 1e4, torch.inf], [-1e4, -1e4, -torch.inf]]), torch.ones(2, 3)
    correction = correct(log_ratio_BT, mask_BT, config(weight=weight, cap=None))
    torch.testing.assert_close(correction.importance_weights_BT.log(), torch.tensor([[20.0], [-20.0]]).expand(2, 3))


@pytest.mark.parametrize(
    "keys",
    [
        {"rejections": [{"level": "token", "estimator": "k1", "high": 2.0}]},
        {"rejections": [{"level": "sequence_mean", "estimator": "k3", "high": 2.0}]},
        {"second_moment": 0.04},
        {"veto": 1e-4},
    ],
)
def test_nan_log_ratio_is_rejected(keys: dict[str, Any]) -> None:
    correction = correct(torch.tensor([[torch.nan, 0.0], [0.1, 0.1]]), torch.ones(2, 2), config(normalise=True, **keys))
    assert correction.mask_BT[0, 0] == 0
    assert correction.mask_BT[1].tolist() == [1.0, 1.0]
    assert correction.importance_weights_BT.isfinite().all()


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_everything_may_be_rejected(weight: str) -> None:
    keys = {"weight": weight, "normalise": True, "second_moment": 0.04}
    correction = correct(torch.full((2, 3), 1e4), torch.ones(2, 3), config(**keys))
    assert not correction.mask_BT.any()
    assert not correction.importance_weights_BT.any()


def test_reasons_of_rejection_are_kept_apart() -> None:
    log_ratio_BT = torch.tensor([[0.9, 0.0, 0.3], [-3.0, 0.1, 0.1], [0.1, 0.1, 0.1]])
    keys = {"rejections": [{"level": "token", "estimator": "k1", "high": 2.0}], "veto": 0.1, "second_moment": 0.02}
    correction = correct(log_ratio_BT, torch.ones(3, 3), config(**keys))
    assert {reason: out.tolist() for reason, out in correction.masked.items()} == {
        "token_k1": [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        "veto": [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]],
        "second_moment": [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
    }
    assert correction.mask_BT.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_two_ranks_have_correction_of_one(weight: str) -> None:
    log_ratio_BT, mask_BT = golden_log_ratio()
    chosen, parts = config(weight=weight, **EVERYTHING), [slice(0, 6), slice(6, None)]
    whole = correct(log_ratio_BT, mask_BT, chosen)
    assert all(out.any() for out in whole.masked.values()), "each reason applies"
    shares = on_two_ranks(lambda rank, total: correct(log_ratio_BT[parts[rank]], mask_BT[parts[rank]], chosen, total))
    assert torch.equal(torch.cat([share.mask_BT for share in shares]), whole.mask_BT)
    shares_BT = torch.cat([share.importance_weights_BT for share in shares])
    torch.testing.assert_close(shares_BT, whole.importance_weights_BT)


# --- rejections ------------------------------------------------------------------------------------------------------

LOG_RATIO_BT = torch.tensor([[0.5, -0.1, 0.0], [0.2, 0.2, 0.2], [-0.6, 0.6, 0.0], [0.0, 0.0, 0.0]])
MASK_BT = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])


def marks(*rows: str) -> list[list[float]]:
    """Marks of the first three rows, such as `x..`; the row without actions has none."""
    return [[float(mark == "x") for mark in row] for row in (*rows, "...")]


@pytest.mark.parametrize(
    ("level", "estimator", "bounds", "expected"),
    [
        ("token", "k1", {"high": math.exp(0.4)}, marks("x..", "...", "xx.")),
        ("token", "k1", {"low": 0, "high": math.exp(0.55)}, marks("...", "...", ".x.")),
        ("token", "k2", {"high": 0.1}, marks("x..", "...", "xx.")),
        # e^0.5 - 1.5 = 0.149, e^-0.6 - 0.4 = 0.149, e^0.6 - 1.6 = 0.222
        ("token", "k3", {"high": 0.2}, marks("...", "...", ".x.")),
        ("sequence_mean", "k1", {"high": math.exp(0.195)}, marks("xx.", "xxx", "...")),
        ("sequence_mean", "k2", {"high": 0.1}, marks("...", "...", "xx.")),
        ("sequence_sum", "k1", {"high": math.exp(0.45)}, marks("...", "xxx", "...")),
        ("sequence_sum", "k3", {"high": 0.16}, marks("...", "...", "xx.")),
        ("sequence_max", "k1", {"high": math.exp(0.4)}, marks("xx.", "...", "xx.")),
        ("sequence_max", "k3", {"high": 0.2}, marks("...", "...", "xx.")),
        # Mean log ratios 0.2, 0.2 and 0; advantages -1, 1 and -1 of each trajectory's actions.
        ("sequence_mean", "k1", {"low": math.exp(0.1)}, marks("...", "...", "xx.")),
        ("sequence_mean", "k1", {"low": math.exp(0.25), "only_bad": True}, marks("xx.", "...", "xx.")),
        ("token", "k1", {"high": math.exp(0.15), "only_bad": True}, marks("x..", "...", "xx.")),
    ],
)
def test_rule_rejects_actions_or_trajectories(
    level: str, estimator: str, bounds: dict[str, Any], expected: list[list[float]]
) -> None:
    rule = RejectionConfig.model_validate({"level": level, "estimator": estimator, **bounds})
    advantages_BT = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]]).expand_as(MASK_BT)
    assert rejected(LOG_RATIO_BT, MASK_BT, rule, advantages_BT).tolist() == expected


@pytest.mark.parametrize(("log_bound", "expected"), [(-0.5, marks("...", "...", "xx.")), (-0.7, marks(*["..."] * 3))])
def test_veto_rejects_whole_trajectory(log_bound: float, expected: list[list[float]]) -> None:
    assert vetoed(LOG_RATIO_BT, MASK_BT, math.exp(log_bound)).tolist() == expected


@pytest.mark.parametrize(
    ("log_ratios", "mask", "bound", "rejects"),
    [
        ([0.1, -1.0, 2.0, 0.84], [1, 1, 1, 1], 2.0, [0, 0, 0, 0]),  # mean of all squares: 1.43
        ([0.1, -1.0, 2.0, 0.84], [1, 1, 1, 1], 0.6, [0, 0, 1, 0]),  # of the others: 0.57
        ([0.1, -1.0, 2.0, 0.84], [1, 1, 1, 1], 0.5, [0, 1, 1, 0]),
        ([0.1, -1.0, 2.0, 0.84], [1, 1, 1, 1], 0.001, [1, 1, 1, 1]),
        ([0.1, 0.0, 0.5, 0.0], [1, 0, 1, 0], 0.1, [0, 0, 1, 0]),
        ([0.1, 0.0, 0.5, 0.0], [0, 0, 0, 0], 0.1, [0, 0, 0, 0]),
        ([0.0] * 4 + [1.0, -1.0], [1] * 6, 0.3, [0] * 4 + [1, 1]),  # equal squares go together
    ],
)
def test_second_moment_rejects_farthest_actions(
    log_ratios: list[float], mask: list[float], bound: float, rejects: list[float]
) -> None:
    found_BT = outliers(torch.tensor([log_ratios]), torch.tensor([mask]).float(), bound, one_rank)
    assert found_BT.tolist() == [rejects]


def test_second_moment_needs_few_collectives() -> None:
    calls = []

    def counted(values: Tensor) -> Tensor:
        calls.append(values)
        return values

    outliers(torch.randn(100, 100, generator=torch.Generator().manual_seed(1)), torch.ones(100, 100), 0.04, counted)
    assert len(calls) <= 4


@settings(max_examples=200)
@given(log_ratios=st.lists(st.floats(-25, 25, width=32), min_size=1, max_size=30), bound=st.floats(1e-4, 500))
def test_second_moment_rejects_no_more_than_needed(log_ratios: list[float], bound: float) -> None:
    log_ratio_BT = torch.tensor([log_ratios])
    out_BT = outliers(log_ratio_BT, torch.ones_like(log_ratio_BT), bound, one_rank)
    squares_BT = log_ratio_BT.clamp(-20, 20).square().double()
    kept, gone = squares_BT[out_BT == 0], squares_BT[out_BT == 1]
    if len(kept):
        assert float(kept.mean()) <= bound * (1 + 1e-9)
    if len(gone):
        assert not len(kept) or kept.max() < gone.min()
        with_next = torch.cat([kept, gone[gone == gone.min()]])
        assert float(with_next.mean()) > bound * (1 - 1e-9)


# --- any batch -------------------------------------------------------------------------------------------------------

RULES = st.builds(
    lambda level, estimator, high: {"level": level, "estimator": estimator, "high": high},
    st.sampled_from(["token", "sequence_mean", "sequence_sum", "sequence_max"]),
    st.sampled_from(["k1", "k2", "k3"]),
    st.floats(1.01, 5),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    rows, actions = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    log_ratios = draw(st.lists(st.floats(-30, 30, width=32), min_size=rows * actions, max_size=rows * actions))
    lengths = draw(st.lists(st.integers(0, actions), min_size=rows, max_size=rows))
    mask_BT = (torch.arange(actions)[None] < torch.tensor(lengths)[:, None]).float()
    return torch.tensor(log_ratios).reshape(rows, actions), mask_BT


@settings(max_examples=60)
@given(
    batch=batches(), rules=st.lists(RULES, max_size=3, unique_by=lambda rule: (rule["level"], rule["estimator"])),
    bound=st.none() | st.floats(0.01, 5), veto=st.none() | st.floats(1e-4, 0.9),
)  # fmt: skip
def test_each_action_is_kept_or_has_reason(
    batch: tuple[Tensor, Tensor], rules: list[dict[str, Any]], bound: float | None, veto: float | None
) -> None:
    log_ratio_BT, mask_BT = batch
    correction = correct(log_ratio_BT, mask_BT, config(rejections=rules, second_moment=bound, veto=veto))
    out_BT = torch.zeros_like(mask_BT)
    for reason_BT in correction.masked.values():
        out_BT = torch.maximum(out_BT, reason_BT)
    assert torch.equal(correction.mask_BT, mask_BT - out_BT)
    assert not (correction.importance_weights_BT * (1 - correction.mask_BT)).any()


# --- interpolation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps_per_version", "unpublished_steps", "lags"),
    [(1, 0, [0, 1, 3, 0, 0]), (4, 0, [0, 4, 12, 0, 0]), (4, 3, [3, 7, 15, 0, 3])],
)
def test_lag_is_in_training_steps(steps_per_version: int, unpublished_steps: int, lags: list[int]) -> None:
    found_BT = lag_in_steps(
        torch.tensor([[7, 6, 4, -1, 8]], dtype=torch.int32),  # -1: unknown; 8: a server that is ahead
        consuming_version=7, steps_per_version=steps_per_version, unpublished_steps=unpublished_steps,
    )  # fmt: skip
    assert found_BT.tolist() == [lags]


def test_anchor_lies_between_behaviour_and_target_by_lag() -> None:
    behaviour_BT, target_BT = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -2.2, -3.3]])
    found_BT = interpolate(target_BT, behaviour_BT, torch.tensor([[3, 1, 0]]))
    torch.testing.assert_close(found_BT, torch.tensor([[-1.375, -2.1, -3.0]]))


# --- settings --------------------------------------------------------------------------------------------------------

TOKEN_K1 = {"level": "token", "estimator": "k1", "high": 2.0}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"cap": 2.0, "band": (0.5, 2.0)}, "cap and band"),
        ({"band": (2.0, 0.5)}, r"band=\[2.0, 0.5\]"),
        ({"weight": "none", "cap": 2.0, "normalise": True}, "cap, normalise"),
        ({"proximal": "behaviour", "weight": "token"}, "proximal.* weight"),
        ({"proximal": "behaviour", "veto": 1e-4, "rejections": [TOKEN_K1]}, "rejections, veto"),
        ({"proximal": "interpolate", "normalise": True}, "proximal: interpolate"),
        ({"rejections": [TOKEN_K1, {**TOKEN_K1, "high": 3.0}]}, "token_k1"),
        ({"rejections": [{**TOKEN_K1, "high": 0.9}]}, "high=0.9"),
        ({"rejections": [{**TOKEN_K1, "estimator": "k2", "low": 0.1}]}, "low.* k2"),
        ({"rejections": [{**TOKEN_K1, "low": 2.0}]}, "low=2"),
        ({"rejections": [{**TOKEN_K1, "high": None}]}, "give high"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        CorrectionConfig.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "weight", "cap"),
    [
        ({}, "token", 2.0), ({"band": (0.5, 2.0)}, "token", None), ({"weight": "none"}, "none", None),
        ({"proximal": "behaviour"}, "none", None), ({"cap": None}, "token", None),
    ],
)  # fmt: skip
def test_dependent_defaults_survive_dump(keys: dict[str, Any], weight: str, cap: float | None) -> None:
    config = CorrectionConfig.model_validate(keys)
    assert (config.weight, config.cap) == (weight, cap)
    assert CorrectionConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        ({"weight": "sequence"}, False), ({"normalise": True}, True), ({"rejections": [TOKEN_K1]}, True),
        ({"second_moment": 0.04}, True), ({"veto": 1e-4}, True),
    ],
)  # fmt: skip
def test_rules_over_step_need_proximal_first(keys: dict[str, Any], first: bool) -> None:
    assert CorrectionConfig.model_validate(keys).needs_proximal_first is first
