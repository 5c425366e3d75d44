"""The bound of the second moment: kept, and at the smallest price."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.algorithms.advantages.base import alone
from slipstream.learner.algorithms.correction.rejection import outliers


@pytest.mark.parametrize(
    ("bound", "left_out"),
    [
        (2.0, [0.0, 0.0, 0.0, 0.0]),  # mean of all squares: 1.43
        (0.6, [0.0, 0.0, 1.0, 0.0]),  # of the others: 0.57
        (0.5, [0.0, 1.0, 1.0, 0.0]),
        (0.001, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_the_farthest_actions_go_until_the_rest_is_within_the_bound(bound: float, left_out: list[float]) -> None:
    log_ratio_BT = torch.tensor([[0.1, -1.0, 2.0, 0.84]])
    assert outliers(log_ratio_BT, torch.ones(1, 4), bound, alone).tolist() == [left_out]


def test_actions_outside_the_mask_neither_count_nor_go() -> None:
    log_ratio_BT = torch.tensor([[0.1, 0.0, 0.5]])
    assert outliers(log_ratio_BT, torch.tensor([[1.0, 0.0, 1.0]]), 0.1, alone).tolist() == [[0.0, 0.0, 1.0]]
    assert outliers(log_ratio_BT, torch.zeros(1, 3), 0.1, alone).tolist() == [[0.0, 0.0, 0.0]]


def test_actions_of_the_same_square_stay_or_go_together() -> None:
    log_ratio_BT = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0, -1.0]])
    assert outliers(log_ratio_BT, torch.ones(1, 6), 0.3, alone).tolist() == [[0.0, 0.0, 0.0, 0.0, 1.0, 1.0]]


def test_the_limit_takes_few_collectives_however_many_actions_there_are() -> None:
    asked = []

    def counted(values: torch.Tensor) -> torch.Tensor:
        asked.append(values)
        return values

    outliers(torch.randn(100, 100, generator=torch.Generator().manual_seed(1)), torch.ones(100, 100), 0.04, counted)
    assert len(asked) <= 4


@settings(max_examples=200)
@given(
    log_ratios=st.lists(st.floats(-25, 25, width=32), min_size=1, max_size=30),
    bound=st.floats(1e-4, 500),
)
def test_what_is_left_is_within_the_bound_and_one_square_more_would_not_be(
    log_ratios: list[float], bound: float
) -> None:
    log_ratio_BT = torch.tensor([log_ratios])
    out_BT = outliers(log_ratio_BT, torch.ones_like(log_ratio_BT), bound, alone)
    squares_BT = log_ratio_BT.clamp(-20, 20).square().double()
    kept, gone = squares_BT[out_BT == 0], squares_BT[out_BT == 1]
    if len(kept):
        assert float(kept.mean()) <= bound * (1 + 1e-9)
    if len(gone):
        assert not len(kept) or kept.max() < gone.min()
        with_next = torch.cat([kept, gone[gone == gone.min()]])
        assert float(with_next.mean()) > bound * (1 - 1e-9)
