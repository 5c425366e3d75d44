"""Rejection rules, the veto, and the bound of the second moment."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.configs.schema.learner import RejectionConfig
from slipstream.learner.algorithms.advantages.base import one_rank
from slipstream.learner.algorithms.correction.rejection import outliers, rejected, vetoed

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
    ],
)
def test_rule_rejects_actions_or_trajectories(
    level: str, estimator: str, bounds: dict[str, Any], expected: list[list[float]]
) -> None:
    rule = RejectionConfig.model_validate({"level": level, "estimator": estimator, **bounds})
    assert rejected(LOG_RATIO_BT, MASK_BT, rule).tolist() == expected


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
