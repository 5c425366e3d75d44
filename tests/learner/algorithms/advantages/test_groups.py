"""Statistics of groups of different sizes, and whitening."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import one_rank
from slipstream.learner.algorithms.advantages.groups import Groups, whiten
from tests.learner.algorithms.advantages.batches import matrix, vector

# Rows of a group need not stand together.
GROUPS, REWARD_B = Groups(torch.tensor([1, 0, 1, 2, 1]), 3), vector(1, 5, 2, -3, 6)


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        (GROUPS.sum, (9, 5, 9, -3, 9)),
        (GROUPS.max, (6, 5, 6, -3, 6)),
        (lambda values_B: GROUPS.size(values_B.dtype), (3, 1, 3, 1, 3)),
        (GROUPS.deviations, (-2, 0, -1, 0, 3)),
        # The weighted mean is (1 · 1 + 2 · 2 + 6 · 5) / 8 = 4.375.
        (lambda values_B: GROUPS.deviations(values_B, vector(1, 7, 2, 9, 5)), (-3.375, 0, -2.375, 0, 1.625)),
        # Squared deviations 4 + 1 + 9, over 2.
        (lambda values_B: GROUPS.std(values_B).square(), (7, 0, 7, 0, 7)),
    ],
    ids=["sum", "max", "size", "deviations", "weighted deviations", "variance"],
)
def test_each_row_has_statistic_of_its_group(
    statistic: Callable[[Tensor], Tensor], expected: tuple[float, ...]
) -> None:
    torch.testing.assert_close(statistic(REWARD_B), vector(*expected))


def test_sums_of_matrix_are_per_action() -> None:
    torch.testing.assert_close(GROUPS.sum(torch.ones(5, 2).double() * vector(1, 10))[0], vector(3, 30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_values_have_no_deviation(dtype: torch.dtype) -> None:
    group, same_B = Groups(torch.zeros(6, dtype=torch.long), 1), torch.full((6,), 0.1, dtype=dtype)
    assert group.deviations(same_B).abs().max() == 0
    assert group.std(same_B).abs().max() == 0


@pytest.mark.parametrize(
    ("values_BT", "mask_BT", "expected_BT"),
    [
        (matrix([1, 3], [5, 100]), matrix([1, 1], [1, 0]), matrix([-1, 0], [1, 0])),  # mean 3, variance 4
        (matrix([7]), matrix([1]), matrix([0])),
        (matrix([7, 7]), matrix([1, 1]), matrix([0, 0])),
    ],
    ids=["masked", "one value", "equal values"],
)
def test_whitened_values_have_mean_0_and_variance_1(values_BT: Tensor, mask_BT: Tensor, expected_BT: Tensor) -> None:
    torch.testing.assert_close(whiten(values_BT, mask_BT, one_rank), expected_BT)
