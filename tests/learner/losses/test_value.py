"""The critic's loss."""

import pytest
import torch
from torch import Tensor

from slipstream.learner.algorithms.losses.clipped import value_loss


def one(value: float, old: float, target: float, clip_range: float | None) -> tuple[float, float, float]:
    """Loss, gradient and `clipped` of one action."""
    values_BT = torch.tensor([[value]], requires_grad=True)
    terms = value_loss(values_BT, torch.tensor([[old]]), torch.tensor([[target]]), clip_range=clip_range)
    (gradient_BT,) = torch.autograd.grad(terms.loss_BT.sum(), values_BT)
    return terms.loss_BT.item(), gradient_BT.item(), terms.clipped_BT.item()


@pytest.mark.parametrize(
    ("value", "old", "clip_range", "loss", "gradient", "clipped"),
    [
        (1.0, 0.0, None, 0.5, -1.0, 0),
        (0.1, 0.0, 0.2, 0.5 * 1.9**2, -1.9, 0),  # moved by less than the range
        (1.0, 0.0, 0.2, 0.5 * 1.8**2, 0.0, 1),  # moved far enough towards the return
        (-1.0, 0.0, 0.2, 0.5 * 9, -3.0, 0),  # moved the wrong way
    ],
)
def test_loss_and_gradient_of_one_value(
    value: float, old: float, clip_range: float | None, loss: float, gradient: float, clipped: int
) -> None:
    assert one(value, old, 2.0, clip_range) == pytest.approx((loss, gradient, clipped))


def test_the_gradient_is_that_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(3))

    def loss(values_BT: Tensor) -> Tensor:
        return value_loss(values_BT, old, returns, clip_range=0.5).loss_BT

    assert 0 < value_loss(values, old, returns, clip_range=0.5).clipped_BT.sum() < values.numel()
    assert torch.autograd.gradcheck(loss, values.requires_grad_())
