"""The correction as a whole, and what it promises."""

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.configs.schema.learner import CorrectionConfig
from slipstream.learner.algorithms.correction.apply import Correction, correct
from tests.learner.correction.golden import golden_batch

EVERYTHING = {
    "normalise": True,
    "rejections": [{"level": "sequence_max", "estimator": "k2", "high": 0.2}],
    "second_moment": 0.03,
    "veto": 0.5,
}


def config(**keys: Any) -> CorrectionConfig:
    return CorrectionConfig.model_validate(keys)


# --- weights -------------------------------------------------------------------------------------------------------


def test_without_a_weight_every_action_counts_as_it_is() -> None:
    log_ratio_BT, mask_BT = golden_batch()
    correction = correct(log_ratio_BT, mask_BT, config(weight="none"))
    assert torch.equal(correction.importance_weights_BT, mask_BT)
    assert not correction.truncated_BT.any()


@pytest.mark.parametrize(
    ("keys", "weights", "truncated"),
    [
        ({"cap": 2.0}, [2.0, 0.5, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]),
        ({"cap": None}, [4.0, 0.5, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        ({"band": (0.75, 2.0)}, [0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]),
        ({"weight": "sequence", "cap": 1.5}, [1.5, 1.5, 1.5, 0.0], [1.0, 1.0, 1.0, 0.0]),
        ({"cap": None, "normalise": True}, [4.0 / (5.5 / 3), 0.5 / (5.5 / 3), 1.0 / (5.5 / 3), 0.0], [0.0] * 4),
    ],
)
def test_cap_and_band_truncate_the_ratio_of_the_action_or_of_the_answer(
    keys: dict[str, Any], weights: list[float], truncated: list[float]
) -> None:
    log_ratio_BT = torch.tensor([[4.0, 0.5, 1.0, 9.0]]).log()
    correction = correct(log_ratio_BT, torch.tensor([[1.0, 1.0, 1.0, 0.0]]), config(**keys))
    torch.testing.assert_close(correction.importance_weights_BT, torch.tensor([weights]))
    assert correction.truncated_BT.tolist() == [truncated]


def test_the_weights_of_answers_are_normalised_by_the_mean_over_answers() -> None:
    log_ratio_BT = torch.tensor([[3.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).clamp(min=1e-3).log()
    mask_BT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    correction = correct(log_ratio_BT, mask_BT, config(weight="sequence", cap=None, normalise=True))
    torch.testing.assert_close(correction.importance_weights_BT, torch.tensor([[1.5] * 3, [0.5, 0.0, 0.0], [0.0] * 3]))


def test_weights_are_normalised_over_what_is_left() -> None:
    log_ratio_BT, mask_BT = golden_batch()
    correction = correct(log_ratio_BT, mask_BT, config(**EVERYTHING))
    assert 0 < correction.mask_BT.sum() < mask_BT.sum()
    assert float(correction.importance_weights_BT.sum() / correction.mask_BT.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_a_huge_log_ratio_overflows_nothing(weight: str) -> None:
    log_ratio_BT, mask_BT = torch.tensor([[1e4, 1e4, torch.inf], [-1e4, -1e4, -torch.inf]]), torch.ones(2, 3)
    correction = correct(log_ratio_BT, mask_BT, config(weight=weight, cap=None))
    torch.testing.assert_close(correction.importance_weights_BT.log(), torch.tensor([[20.0], [-20.0]]).expand(2, 3))
    correction = correct(log_ratio_BT, mask_BT, config(weight=weight, cap=None, second_moment=0.04))
    assert not correction.mask_BT.any()
    assert not correction.importance_weights_BT.any()


@pytest.mark.parametrize(
    "keys",
    [
        {"rejections": [{"level": "token", "estimator": "k1", "high": 2.0}]},
        {"rejections": [{"level": "sequence_mean", "estimator": "k3", "high": 2.0}]},
        {"second_moment": 0.04},
        {"veto": 1e-4},
    ],
)
def test_a_log_ratio_that_is_no_number_is_left_out_and_spoils_nothing(keys: dict[str, Any]) -> None:
    log_ratio_BT = torch.tensor([[float("nan"), 0.0], [0.1, 0.1]])
    correction = correct(log_ratio_BT, torch.ones(2, 2), config(normalise=True, **keys))
    assert correction.mask_BT[0, 0] == 0
    assert correction.mask_BT[1].tolist() == [1.0, 1.0]
    assert correction.importance_weights_BT.isfinite().all()


def test_where_nothing_is_left_the_weights_are_zero() -> None:
    correction = correct(torch.full((2, 3), 5.0), torch.ones(2, 3), config(normalise=True, second_moment=0.04))
    assert not correction.mask_BT.any()
    assert not correction.importance_weights_BT.any()


def test_rejection_veto_and_second_moment_are_counted_apart() -> None:
    log_ratio_BT = torch.tensor([[0.9, 0.0, 0.3], [-3.0, 0.1, 0.1], [0.1, 0.1, 0.1]])
    keys = {"rejections": [{"level": "token", "estimator": "k1", "high": 2.0}], "veto": 0.1, "second_moment": 0.02}
    correction = correct(log_ratio_BT, torch.ones(3, 3), config(**keys))
    assert {reason: out.tolist() for reason, out in correction.masked.items()} == {
        "token_k1": [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        "veto": [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]],
        "second_moment": [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
    }
    assert correction.mask_BT.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]


# --- several ranks -------------------------------------------------------------------------------------------------


def on_two_ranks(work: Callable[[int, Callable[[Tensor], Tensor]], Correction]) -> list[Correction]:
    """What two ranks make of their parts, whose `total` is the sum of what both of them bring to it."""
    barrier = Barrier(2, timeout=10)
    brought: list[Tensor] = [torch.empty(0), torch.empty(0)]
    found: dict[int, Correction] = {}

    def rank(number: int) -> None:
        def total(values: Tensor) -> Tensor:
            brought[number] = values
            barrier.wait()
            summed = brought[0] + brought[1]
            barrier.wait()
            return summed

        found[number] = work(number, total)

    threads = [Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[0], found[1]]


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_two_ranks_make_of_their_parts_what_one_makes_of_the_whole(weight: str) -> None:
    log_ratio_BT, mask_BT = golden_batch()
    chosen = config(weight=weight, **EVERYTHING)
    parts = [slice(0, 6), slice(6, None)]
    whole = correct(log_ratio_BT, mask_BT, chosen)
    assert all(out.any() for out in whole.masked.values()), "each reason has something to do"
    shares = on_two_ranks(lambda rank, total: correct(log_ratio_BT[parts[rank]], mask_BT[parts[rank]], chosen, total))
    assert torch.equal(torch.cat([share.mask_BT for share in shares]), whole.mask_BT)
    shares_BT = torch.cat([share.importance_weights_BT for share in shares])
    torch.testing.assert_close(shares_BT, whole.importance_weights_BT)


# --- what holds for any batch --------------------------------------------------------------------------------------

LEVELS = st.sampled_from(["token", "sequence_mean", "sequence_sum", "sequence_max"])
RULES = st.builds(
    lambda level, estimator, high: {"level": level, "estimator": estimator, "high": high},
    LEVELS,
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
@given(batch=batches(), weight=st.sampled_from(["token", "sequence"]), cap=st.floats(0.1, 50))
def test_weights_are_never_above_the_cap(batch: tuple[Tensor, Tensor], weight: str, cap: float) -> None:
    weights_BT = correct(*batch, config(weight=weight, cap=cap)).importance_weights_BT
    assert bool((weights_BT >= 0).all())
    assert bool((weights_BT <= torch.tensor(cap)).all())


@settings(max_examples=60)
@given(batch=batches(), weight=st.sampled_from(["token", "sequence"]), low=st.floats(0, 1), width=st.floats(0.1, 9))
def test_weights_are_in_the_band_or_zero(batch: tuple[Tensor, Tensor], weight: str, low: float, width: float) -> None:
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
def test_a_correction_never_adds_to_the_mask(
    batch: tuple[Tensor, Tensor], rules: list[dict[str, Any]], bound: float | None, veto: float | None
) -> None:
    log_ratio_BT, mask_BT = batch
    chosen = config(rejections=rules, second_moment=bound, veto=veto)
    correction = correct(log_ratio_BT, mask_BT, chosen)
    out_BT = torch.zeros_like(mask_BT)
    for reason_BT in correction.masked.values():
        out_BT = torch.maximum(out_BT, reason_BT)
    assert torch.equal(correction.mask_BT, mask_BT - out_BT), "each action is kept, or has a reason"
    assert not (correction.importance_weights_BT * (1 - correction.mask_BT)).any()
