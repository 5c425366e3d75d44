"""The off-policy correction as a whole, and the interpolated proximal policy."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.configs.schema.learner import CorrectionConfig
from slipstream.learner.algorithms.correction.apply import correct, interpolate, lag_in_steps
from tests.learner.algorithms.golden import golden_log_ratio
from tests.learner.algorithms.ranks import on_two_ranks

EVERYTHING = {
    "normalise": True,
    "rejections": [{"level": "sequence_max", "estimator": "k2", "high": 0.2}],
    "second_moment": 0.03,
    "veto": 0.5,
}


def config(**keys: Any) -> CorrectionConfig:
    return CorrectionConfig.model_validate(keys)


# --- importance weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "weights", "truncated"),
    [
        ({"weight": "none"}, [1.0, 1.0, 1.0], [0, 0, 0]),
        ({"cap": 2.0}, [2.0, 0.5, 1.0], [1, 0, 0]),
        ({"cap": None}, [4.0, 0.5, 1.0], [0, 0, 0]),
        ({"band": (0.75, 2.0)}, [0.0, 0.0, 1.0], [1, 1, 0]),
        ({"weight": "sequence", "cap": 1.5}, [1.5, 1.5, 1.5], [1, 1, 1]),
        ({"cap": None, "normalise": True}, [4.0 / (5.5 / 3), 0.5 / (5.5 / 3), 1.0 / (5.5 / 3)], [0, 0, 0]),
    ],
)
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


# --- any batch -------------------------------------------------------------------------------------------------------

RULES = st.builds(
    lambda level, estimator, high: {"level": level, "estimator": estimator, "high": high},
    st.sampled_from(["token", "sequence_mean", "sequence_sum", "sequence_max"]),
    st.sampled_from(["k1", "k2", "k3"]),
    st.floats(1.01, 5),
)
WEIGHTS = st.sampled_from(["token", "sequence"])


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    rows, actions = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    log_ratios = draw(st.lists(st.floats(-30, 30, width=32), min_size=rows * actions, max_size=rows * actions))
    lengths = draw(st.lists(st.integers(0, actions), min_size=rows, max_size=rows))
    mask_BT = (torch.arange(actions)[None] < torch.tensor(lengths)[:, None]).float()
    return torch.tensor(log_ratios).reshape(rows, actions), mask_BT


@settings(max_examples=60)
@given(batch=batches(), weight=WEIGHTS, cap=st.floats(0.1, 50))
def test_weights_are_at_most_cap(batch: tuple[Tensor, Tensor], weight: str, cap: float) -> None:
    weights_BT = correct(*batch, config(weight=weight, cap=cap)).importance_weights_BT
    assert bool(((weights_BT >= 0) & (weights_BT <= torch.tensor(cap))).all())


@settings(max_examples=60)
@given(batch=batches(), weight=WEIGHTS, low=st.floats(0, 1), width=st.floats(0.1, 9))
def test_weights_are_in_band_or_zero(batch: tuple[Tensor, Tensor], weight: str, low: float, width: float) -> None:
    weights_BT = correct(*batch, config(weight=weight, band=(low, low + width))).importance_weights_BT
    inside_BT = (weights_BT >= low) & (weights_BT <= low + width)
    assert bool((inside_BT | (weights_BT == 0)).all())


@settings(max_examples=60)
@given(
    batch=batches(),
    rules=st.lists(RULES, max_size=3, unique_by=lambda rule: (rule["level"], rule["estimator"])),
    bound=st.none() | st.floats(0.01, 5),
    veto=st.none() | st.floats(1e-4, 0.9),
)
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
        consuming_version=7,
        steps_per_version=steps_per_version,
        unpublished_steps=unpublished_steps,
    )
    assert found_BT.tolist() == [lags]


def test_anchor_lies_between_behaviour_and_target_by_lag() -> None:
    behaviour_BT, target_BT = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -2.2, -3.3]])
    found_BT = interpolate(target_BT, behaviour_BT, torch.tensor([[3, 1, 0]]))
    torch.testing.assert_close(found_BT, torch.tensor([[-1.375, -2.1, -3.0]]))
