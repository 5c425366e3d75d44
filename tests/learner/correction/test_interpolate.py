"""The proximal policy by interpolation, and the age of actions in training steps."""

import pytest
import torch

from slipstream.learner.algorithms.correction.apply import interpolate, lag_in_steps


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
