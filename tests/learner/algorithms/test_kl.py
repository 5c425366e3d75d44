"""Estimates of the KL from the reference policy, and the coefficient of its penalty."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from slipstream.configs.schema.learner import KlConfig, KlEstimator
from slipstream.learner.algorithms.kl import Coefficient, kl_estimate
from tests.learner.algorithms.golden import INPUTS

ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if not name.endswith("+")])
def test_the_gradient_is_that_of_finite_differences(estimator: KlEstimator) -> None:
    reference = INPUTS["reference_logprobs"]

    def estimate(logprobs_BT: Tensor) -> Tensor:
        return kl_estimate(logprobs_BT, reference, estimator)

    assert torch.autograd.gradcheck(estimate, INPUTS["target_logprobs"].clone().requires_grad_())


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name.endswith("+")])
def test_with_a_plus_the_value_is_the_estimates_and_the_gradient_that_of_k2(estimator: KlEstimator) -> None:
    logprobs, reference = INPUTS["target_logprobs"].clone().requires_grad_(), INPUTS["reference_logprobs"]
    found = kl_estimate(logprobs, reference, estimator)
    base: KlEstimator = estimator.removesuffix("+")  # type: ignore[assignment]
    torch.testing.assert_close(found, kl_estimate(logprobs, reference, base))
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    torch.testing.assert_close(gradient, (logprobs - reference).detach())


def test_on_average_over_the_policys_own_actions_k2_has_the_gradient_of_the_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, reference = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    logprobs, reference = logits.log_softmax(0), reference.log_softmax(0)
    probabilities = logprobs.exp().detach()
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((probabilities * kl_estimate(logprobs, reference, "k3+")).sum(), logits)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("delta", [-500.0, -21.0, 21.0, 500.0])
def test_far_from_the_reference_the_estimate_is_finite_and_never_pushes_further(
    estimator: KlEstimator, delta: float
) -> None:
    logprobs = torch.tensor([[delta]], requires_grad=True)
    found = kl_estimate(logprobs, torch.zeros(1, 1), estimator)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert found.isfinite().all()
    assert gradient.isfinite().all()
    # k1's gradient does not know the sign.
    assert gradient.item() * delta >= 0 or estimator == "k1"


def test_a_fixed_coefficient_stays_what_the_configuration_says() -> None:
    coefficient = Coefficient(KlConfig(coefficient=0.3))
    coefficient.update(kl=5.0, episodes=1000)
    coefficient.restore(0.7)
    assert coefficient.value == 0.3


@pytest.mark.parametrize(
    ("kl", "answers", "factor"),
    [
        (0.1, 256, 1.0),
        (0.11, 256, 1 + 0.1 * 0.256),
        (5.0, 256, 1 + 0.2 * 0.256),  # the error counts as 20 % at most
        (0.0, 256, 1 - 0.2 * 0.256),
        (-1.0, 256, 1 - 0.2 * 0.256),  # k1 may be negative
        (0.0, 50_000, 0.8),  # one step changes it by a fifth at most
    ],
)
def test_an_adaptive_coefficient_is_raised_above_the_target_and_lowered_below(
    kl: float, answers: int, factor: float
) -> None:
    coefficient = Coefficient(KlConfig(coefficient=0.3, target=0.1, horizon=1000))
    coefficient.update(kl, answers)
    assert coefficient.value == pytest.approx(0.3 * factor)


def test_a_divergence_that_is_no_number_does_not_become_the_coefficient() -> None:
    coefficient = Coefficient(KlConfig(coefficient=0.3, target=0.1, horizon=1000))
    coefficient.update(math.nan, episodes=100)
    assert coefficient.value == 0.3


def test_an_adaptive_coefficient_goes_on_from_a_checkpoint() -> None:
    coefficient = Coefficient(KlConfig(coefficient=0.3, target=0.1, horizon=1000))
    coefficient.restore(0.7)
    assert coefficient.value == 0.7


def test_an_adaptive_coefficient_finds_the_one_that_holds_the_target() -> None:
    coefficient = Coefficient(KlConfig(coefficient=1.0, target=0.1, horizon=1000))
    for _ in range(500):
        coefficient.update(kl=0.02 / coefficient.value, episodes=256)  # a KL that the penalty pushes down
    assert coefficient.value == pytest.approx(0.2, rel=1e-3)
