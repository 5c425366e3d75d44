"""The decoupled PPO objective: by hand, by finite differences, and as the reference implementation has it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.schema.learner import LossConfig
from slipstream.learner.losses import LossTerms, decoupled_ppo

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "algorithms.json").read_text("utf-8"))
CONFIG = LossConfig(clip_low=0.2, clip_high=0.3, behaviour_weight_cap=2.0)


def terms(ratio: float, weight: float, advantage: float) -> tuple[LossTerms, float]:
    """The loss terms of one action with these ratios, and the gradient with respect to log π_θ."""
    proximal = torch.tensor([-1.0], dtype=torch.float64)
    target = (proximal + math.log(ratio)).requires_grad_()
    behaviour = proximal - math.log(weight)
    found = decoupled_ppo(target, proximal, behaviour, torch.tensor([advantage], dtype=torch.float64), CONFIG)
    (gradient,) = torch.autograd.grad(found.loss_A.sum(), target)
    return found, float(gradient)


@pytest.mark.parametrize(
    ("ratio", "weight", "advantage", "loss", "gradient"),
    [
        (1.0, 1.0, 1.5, -1.5, -1.5),
        (1.1, 0.5, 2.0, -1.1, -1.1),  # within the clip: -w·r·A, and so is its gradient
        (1.1, 0.5, -2.0, 1.1, 1.1),
        (1.5, 1.0, 2.0, -2.6, 0.0),  # good, and pushed far enough
        (0.5, 1.0, -2.0, 1.6, 0.0),  # bad, and pushed far enough
        (1.5, 1.0, -2.0, 3.0, 3.0),  # bad, and it went the wrong way: never clipped
        (0.5, 1.0, 2.0, -1.0, -1.0),
        (1.0, 5.0, 1.0, -2.0, -2.0),  # the behaviour weight stops at the cap
        (1.5, 5.0, 2.0, -5.2, 0.0),
    ],
)
def test_loss_and_gradient_of_one_action(
    ratio: float, weight: float, advantage: float, loss: float, gradient: float
) -> None:
    found, own_gradient = terms(ratio, weight, advantage)
    assert found.loss_A.item() == pytest.approx(loss)
    assert own_gradient == pytest.approx(gradient)
    assert found.behaviour_weight_A.item() == pytest.approx(weight)
    assert found.truncated_A.item() == (weight > CONFIG.behaviour_weight_cap)
    assert found.clipped_A.item() == (gradient == 0.0)


def random_logprobs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    proximal = -3 * torch.rand(64, generator=generator, dtype=torch.float64)
    target, behaviour = (proximal + 0.5 * torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(2))
    return target, proximal, behaviour, torch.randn(64, generator=generator, dtype=torch.float64)


def test_the_gradient_is_that_of_finite_differences() -> None:
    target, proximal, behaviour, advantages = random_logprobs()

    def loss(logprobs: Tensor) -> Tensor:
        return decoupled_ppo(logprobs, proximal, behaviour, advantages, CONFIG).loss_A

    found = decoupled_ppo(target, proximal, behaviour, advantages, CONFIG)
    for stops, name in ((found.clipped_A, "clipped"), (found.truncated_A, "truncated")):
        assert 0 < stops.sum() < len(stops), f"all or none {name}: the check would miss a branch"
    assert torch.autograd.gradcheck(loss, target.requires_grad_())


def test_neither_anchor_nor_behaviour_policy_gets_a_gradient_through_the_weight() -> None:
    target, proximal, behaviour, advantages = random_logprobs()
    behaviour.requires_grad_()
    found = decoupled_ppo(target.requires_grad_(), proximal, behaviour, advantages, CONFIG)
    found.loss_A.sum().backward()
    assert behaviour.grad is None
    assert not any(tensor.requires_grad for name, tensor in vars(found).items() if name != "loss_A")


def test_where_all_three_policies_agree_it_is_the_policy_gradient() -> None:
    target, _, _, advantages = random_logprobs()
    target.requires_grad_()
    found = decoupled_ppo(target, target.detach(), target.detach(), advantages, CONFIG)
    (gradient,) = torch.autograd.grad(found.loss_A.sum(), target)
    torch.testing.assert_close(gradient, -advantages)
    torch.testing.assert_close(found.loss_A.detach(), -advantages)
    assert not found.clipped_A.any()
    assert not found.truncated_A.any()


@pytest.mark.parametrize(
    ("name", "clip_high", "decoupled"),
    [("ppo_token-mean", 0.2, False), ("ppo_clip_higher", 0.28, False), ("ppo_decoupled_tis2", 0.2, True)],
)
def test_loss_and_gradient_are_those_of_the_reference_implementation(
    name: str, clip_high: float, decoupled: bool
) -> None:
    golden = GOLDEN["losses"][name]
    inputs = {key: torch.tensor(value, dtype=torch.float64) for key, value in GOLDEN["inputs"].items()}
    mask = inputs["mask"].bool()
    target = inputs["target_logprobs"].requires_grad_()
    proximal = inputs["proximal_logprobs"]
    behaviour = inputs["behaviour_logprobs"] if decoupled else proximal
    # The reference caps the loss of bad actions at 3·|A| besides; none here is that far off.
    assert (target.detach() - proximal).exp()[mask].max() < golden["clip_ratio_c"]
    found = decoupled_ppo(
        target[mask],
        proximal[mask],
        behaviour[mask],
        inputs["advantages_for_losses"][mask],
        LossConfig(clip_low=0.2, clip_high=clip_high, behaviour_weight_cap=2.0),
    )
    loss = found.loss_A.mean()
    loss.backward()
    assert loss.item() == pytest.approx(golden["loss"], abs=1e-5)
    assert target.grad is not None
    torch.testing.assert_close(target.grad, torch.tensor(golden["grad"], dtype=torch.float64), atol=1e-5, rtol=0)
