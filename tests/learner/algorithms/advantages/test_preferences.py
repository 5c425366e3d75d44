"""Win rates and the gradient of online DPO, by hand and against the loss itself."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slipstream.learner.algorithms.advantages.base import AdvantageInputs
from slipstream.learner.algorithms.advantages.preferences import online_dpo, win_rate
from slipstream.learner.algorithms.aggregation import aggregate, totals_of
from slipstream.learner.algorithms.losses.base import LossInputs
from slipstream.learner.algorithms.losses.clipped import reinforce
from tests.learner.algorithms.advantages.batches import batch, matrix, vector

GROUPS = [[1.0, 0.0, 0.5, 0.0], [0.3, 0.3], [0.0, 1.0]]
LENGTHS = [3, 1, 2, 3, 2, 2, 1, 3]


def test_win_rates_by_hand() -> None:
    """Wins less losses, over twice the group's size: 3, -2, 1, -2 of 4; equal ones; -1 and 1 of 2."""
    advantages_BT = win_rate(batch(GROUPS, LENGTHS))
    torch.testing.assert_close(advantages_BT[:, 0], vector(3 / 8, -2 / 8, 1 / 8, -2 / 8, 0, 0, -1 / 4, 1 / 4))
    assert advantages_BT[1].tolist() == [-2 / 8, 0, 0], "0 where there is no action"


def with_logprobs(inputs: AdvantageInputs) -> AdvantageInputs:
    shape, generator = inputs.mask_BT.shape, torch.Generator().manual_seed(0)
    policy_BT, reference_BT = (-torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return replace(inputs, logprobs_BT=policy_BT, reference_logprobs_BT=reference_BT)


def test_factors_of_a_pair_by_hand() -> None:
    """h = 1 and 0 of two answers: the preferred one has beta · sigmoid(-beta); four episodes, one group with a pair."""
    inputs = batch([[0.0, 1.0], [0.5, 0.5]], [2, 1, 1, 1])
    inputs = replace(
        inputs,
        logprobs_BT=matrix([-1, -1], [-1, 7], [0, 0], [0, 0]),
        reference_logprobs_BT=matrix([-1, -1], [-2, 0], [0, 0], [0, 0]),
    )
    factor = 4 * 0.5 * torch.sigmoid(torch.tensor(-0.5)).item()
    expected_BT = matrix([-factor, -factor], [factor, 0], [0, 0], [0, 0])
    torch.testing.assert_close(online_dpo(inputs, beta=0.5, pairs="all"), expected_BT, rtol=1e-6, atol=1e-9)


PAIRS = {
    "best_worst": [[(0, 1), (0, 3)], [(7, 6)]],
    "all": [[(0, 1), (0, 2), (0, 3), (2, 1), (2, 3)], [(7, 6)]],
}
"""(preferred, other) of each group that has one."""


@pytest.mark.parametrize("pairs", PAIRS)
def test_gradient_is_that_of_the_dpo_loss(pairs: str) -> None:
    inputs = with_logprobs(batch(GROUPS, LENGTHS))
    mask_BT = inputs.mask_BT
    reference_BT = inputs.reference_logprobs_BT
    assert inputs.logprobs_BT is not None and reference_BT is not None

    def dpo(logprobs_BT: Tensor) -> Tensor:
        h_B = ((logprobs_BT - reference_BT) * mask_BT).sum(-1)
        groups = [
            torch.stack([-logsigmoid(0.7 * (h_B[best] - h_B[worst])) for best, worst in group])
            for group in PAIRS[pairs]
        ]
        return torch.stack([losses.mean() for losses in groups]).mean()

    logprobs_BT = inputs.logprobs_BT.clone().requires_grad_()
    (expected_BT,) = torch.autograd.grad(dpo(logprobs_BT), logprobs_BT)
    advantages_BT = online_dpo(inputs, beta=0.7, pairs=pairs)
    terms = reinforce(LossInputs(logprobs_BT, logprobs_BT.detach(), logprobs_BT.detach(), advantages_BT, mask_BT))
    loss = aggregate(terms.loss_BT, mask_BT, "seq-mean-token-sum", totals_of(mask_BT), horizon=1, constant=None)
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    torch.testing.assert_close(gradient_BT, expected_BT)
    assert torch.autograd.gradcheck(dpo, logprobs_BT)
