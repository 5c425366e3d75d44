"""Aggregation of the losses of an update's actions to one number.

# B rows (trajectories), T actions of the longest
"""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.configs.schema.losses import Aggregation
from slipstream.learner.algorithms.aggregation import Totals, aggregate, totals_of

ROWS, ACTIONS, BATCHES = 7, 5, 4
all_modes = pytest.mark.parametrize("mode", get_args(Aggregation))


def figure(values_BT: Tensor, mask_BT: Tensor, mode: Aggregation, totals: Totals | None = None) -> Tensor:
    return aggregate(values_BT, mask_BT, mode, totals or totals_of(mask_BT), horizon=8, constant=3.0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 10 / 4), ("token-sum", 10.0), ("seq-mean-token-sum", 10 / 2),
        ("seq-mean-token-mean", (6 / 3 + 4) / 2), ("seq-mean-token-sum-norm", 10 / 2 / 8), ("constant", 10 / 3),
    ],
)  # fmt: skip
def test_figures_by_hand(mode: Aggregation, expected: float) -> None:
    values_BT = torch.tensor([[1.0, 2.0, 3.0], [7.0, 7.0, 7.0], [9.0, 4.0, torch.nan]])
    mask_BT = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert totals_of(mask_BT) == Totals(tokens=4, sequences=2)
    assert figure(values_BT, mask_BT, mode).item() == pytest.approx(expected)


@all_modes
@given(
    seed=st.integers(0, 2**16),
    density=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    batch_of_row=st.lists(st.integers(0, BATCHES - 1), min_size=ROWS, max_size=ROWS),
    padding=st.lists(st.integers(0, 2), min_size=BATCHES, max_size=BATCHES),
)
def test_split_into_micro_batches_does_not_matter(
    mode: Aggregation, seed: int, density: float, batch_of_row: list[int], padding: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values_BT = torch.randn(ROWS, ACTIONS, generator=generator, dtype=torch.float64).requires_grad_()
    mask_BT = (torch.rand(ROWS, ACTIONS, generator=generator) < density).double()

    def part(tensor: Tensor, batch: int) -> Tensor:
        """A micro-batch's rows, in another order, padded on the right; it may be empty."""
        rows = [row for row in reversed(range(ROWS)) if batch_of_row[row] == batch]
        return torch.nn.functional.pad(tensor[rows], (0, padding[batch]), value=0.0)

    masks = [part(mask_BT, batch) for batch in range(BATCHES)]
    totals = totals_of(*masks)
    assert totals == totals_of(mask_BT)
    parts = [figure(part(values_BT, batch), masks[batch], mode, totals) for batch in range(BATCHES)]
    together, whole = torch.stack(parts).sum(), figure(values_BT, mask_BT, mode)
    torch.testing.assert_close(together, whole, check_dtype=False)
    gradients = [torch.autograd.grad(found, values_BT)[0] for found in (together, whole)]
    torch.testing.assert_close(gradients[0], gradients[1])
