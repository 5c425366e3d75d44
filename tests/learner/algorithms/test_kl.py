"""Estimates of the KL from the reference policy, and the coefficient of its penalty."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from slipstream.configs.schema.learner import KlConfig, KlEstimator
from slipstream.learner.algorithms.divergence import KlCoefficient, kl_estimate
from tests.learner.algorithms.golden import INPUTS

ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)
REFERENCE = INPUTS["reference_logprobs"]
BEHAVIOUR = INPUTS["behaviour_logprobs"]
BASES: list[KlEstimator] = ["k1", "k2", "k3", "abs", "k3*"]


@pytest.mark.parametrize("estimator", BASES)
def test_gradient_is_that_of_finite_differences(estimator: KlEstimator) -> None:
    def estimate(logprobs_BT: Tensor) -> Tensor:
        return kl_estimate(logprobs_BT, REFERENCE, estimator, BEHAVIOUR)

    assert torch.autograd.gradcheck(estimate, INPUTS["target_logprobs"].clone().requires_grad_())


@pytest.mark.parametrize(("with_plus", "base"), [("k1+", "k1"), ("k2+", "k2"), ("k3+", "k3"), ("abs+", "abs")])
def test_plus_has_value_of_base_and_gradient_of_k2(with_plus: KlEstimator, base: KlEstimator) -> None:
    logprobs = INPUTS["target_logprobs"].clone().requires_grad_()
    found = kl_estimate(logprobs, REFERENCE, with_plus)
    torch.testing.assert_close(found, kl_estimate(logprobs, REFERENCE, base))
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    torch.testing.assert_close(gradient, (logprobs - REFERENCE).detach())


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("delta", [-500.0, -21.0, 21.0, 500.0])
def test_extreme_divergence_is_finite_and_never_grows(estimator: KlEstimator, delta: float) -> None:
    logprobs = torch.tensor([[delta]], requires_grad=True)
    found = kl_estimate(logprobs, torch.zeros(1, 1), estimator, torch.zeros(1, 1))
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert found.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient.item() * delta >= 0 or estimator == "k1", "only the gradient of k1 is constant"


def test_weighted_k3_has_mean_and_gradient_of_kl_under_behaviour() -> None:
    """Exact over the three tokens of a distribution, drawn from another one."""
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    reference, behaviour = (torch.tensor(each).double().log() for each in ([0.2, 0.5, 0.3], [0.6, 0.1, 0.3]))
    logprobs = logits.log_softmax(-1)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    mean = (behaviour.exp() * kl_estimate(logprobs, reference, "k3*", behaviour)).sum()
    torch.testing.assert_close(mean, kl)
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(mean, logits), (expected,))


def test_fixed_coefficient_is_that_of_configuration() -> None:
    coefficient = KlCoefficient(KlConfig(coefficient=0.3))
    coefficient.update(kl=5.0, episodes=1000)
    coefficient.restore(0.7)
    assert coefficient.value == 0.3


@pytest.mark.parametrize(
    ("kl", "episodes", "factor"),
    [
        (0.1, 256, 1.0), (0.11, 256, 1 + 0.1 * 0.256), (5.0, 256, 1 + 0.2 * 0.256), (0.0, 256, 1 - 0.2 * 0.256),
        (-1.0, 256, 1 - 0.2 * 0.256),  # k1 may be negative
        (0.0, 50_000, 0.8), (math.nan, 100, 1.0),
    ],
)  # fmt: skip
def test_adaptive_coefficient_follows_relative_error(kl: float, episodes: int, factor: float) -> None:
    coefficient = KlCoefficient(KlConfig(coefficient=0.3, target=0.1, horizon=1000))
    coefficient.restore(0.7)
    coefficient.update(kl, episodes)
    assert coefficient.value == pytest.approx(0.7 * factor)
