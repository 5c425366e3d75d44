"""Statistics of groups of different sizes, and whitening."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs, alone
from slipstream.learner.algorithms.advantages.groups import (
    deviations,
    group_max,
    group_size,
    group_std,
    group_sum,
    whiten,
)
from tests.learner.algorithms.advantages.batches import batch, matrix, rows, vector

# Rows of a group need not stand together: groups 1, 0, 1, 2, 1.
MIXED = rows(batch([[5.0], [1.0, 2.0, 6.0], [-3.0]]), torch.tensor([1, 0, 2, 4, 3]))


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        (group_sum, (9, 5, 9, -3, 9)),
        (group_max, (6, 5, 6, -3, 6)),
        (lambda _, inputs: group_size(inputs), (3, 1, 3, 1, 3)),
        (deviations, (-2, 0, -1, 0, 3)),
        # The weighted mean is (1 · 1 + 2 · 2 + 6 · 5) / 8 = 4.375.
        (lambda values_B, inputs: deviations(values_B, inputs, vector(1, 7, 2, 9, 5)), (-3.375, 0, -2.375, 0, 1.625)),
        # Squared deviations 4 + 1 + 9, over 2.
        (lambda values_B, inputs: group_std(values_B, inputs).square(), (7, 0, 7, 0, 7)),
    ],
    ids=["sum", "max", "size", "deviations", "weighted deviations", "variance"],
)
def test_each_row_has_statistic_of_its_group(
    statistic: Callable[[Tensor, AdvantageInputs], Tensor], expected: tuple[float, ...]
) -> None:
    torch.testing.assert_close(statistic(MIXED.reward_B, MIXED), vector(*expected))


def test_sums_of_matrix_are_per_action() -> None:
    torch.testing.assert_close(group_sum(MIXED.mask_BT * vector(1, 10), MIXED)[0], vector(3, 30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_values_have_no_deviation(dtype: torch.dtype) -> None:
    same = batch([[0.1] * 6], dtype=dtype)
    assert deviations(same.reward_B, same).abs().max() == 0
    assert group_std(same.reward_B, same).abs().max() == 0


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
    torch.testing.assert_close(whiten(values_BT, mask_BT, alone), expected_BT)
