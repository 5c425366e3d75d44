"""Statistics of groups of different sizes."""

import pytest
import torch

from slipstream.learner.algorithms.advantages.groups import deviations, group_max, group_size, group_std, group_sum
from tests.learner.advantages.batches import batch, rows

# Rows of a group need not stand together: groups 1, 0, 1, 2, 1.
MIXED = rows(batch([[5.0], [1.0, 2.0, 6.0], [-3.0]]), torch.tensor([1, 0, 2, 4, 3]))


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_every_row_has_its_groups_sum_size_and_greatest_value() -> None:
    torch.testing.assert_close(group_sum(MIXED.reward_B, MIXED), values(9, 5, 9, -3, 9))
    torch.testing.assert_close(group_size(MIXED), values(3, 1, 3, 1, 3))
    torch.testing.assert_close(group_max(MIXED.reward_B, MIXED), values(6, 5, 6, -3, 6))


def test_sums_of_a_matrix_are_taken_at_each_action() -> None:
    matrix_BT = MIXED.mask_BT * torch.tensor([1.0, 10.0], dtype=torch.float64)
    torch.testing.assert_close(group_sum(matrix_BT, MIXED)[0], values(3, 30))


def test_deviations_are_from_the_groups_mean() -> None:
    torch.testing.assert_close(deviations(MIXED.reward_B, MIXED), values(-2, 0, -1, 0, 3))


def test_deviations_are_from_the_weighted_mean_if_there_are_weights() -> None:
    # (1 * 1 + 2 * 2 + 6 * 5) / 8 = 4.375
    weights_B = values(1, 7, 2, 7, 5)
    torch.testing.assert_close(deviations(MIXED.reward_B, MIXED, weights_B), values(-3.375, 0, -2.375, 0, 1.625))


def test_standard_deviation_is_the_samples() -> None:
    # Squared deviations 4 + 1 + 9, over 2 (not 3).
    torch.testing.assert_close(group_std(MIXED.reward_B, MIXED), values(7, 0, 7, 0, 7).sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_values_deviate_by_nothing_at_all(dtype: torch.dtype) -> None:
    same = batch([[0.1] * 6], dtype=dtype)
    assert deviations(same.reward_B, same).abs().max() == 0
    assert group_std(same.reward_B, same).abs().max() == 0
