"""The learning rate over the steps, and the optimizer that it is set on."""

import pytest
import torch

from slipstream.configs.schema.learner import OptimizerConfig
from slipstream.learner.optim import build_optimizer, learning_rate, set_learning_rate

CONFIG = OptimizerConfig(lr=1.0, warmup_steps=4, final_lr_fraction=0.2)


def schedule(config: OptimizerConfig, steps: int) -> list[float]:
    return [learning_rate(step, steps=steps, config=config) for step in range(steps)]


def test_the_learning_rate_warms_up_linearly_then_decays_linearly() -> None:
    assert schedule(CONFIG, 8) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4])


def test_decay_ends_at_the_final_fraction() -> None:
    assert learning_rate(8, steps=8, config=CONFIG) == pytest.approx(0.2)


def test_a_final_fraction_of_one_keeps_the_learning_rate() -> None:
    constant = OptimizerConfig(lr=3e-4, warmup_steps=0, final_lr_fraction=1.0)
    assert schedule(constant, 5) == pytest.approx([3e-4] * 5)


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert schedule(OptimizerConfig(lr=1.0, warmup_steps=0), 4) == pytest.approx([1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("warmup_steps", [3, 50])
def test_a_run_within_its_warm_up_has_a_positive_rate(warmup_steps: int) -> None:
    rates = schedule(OptimizerConfig(lr=1.0, warmup_steps=warmup_steps), 3)
    assert rates == pytest.approx([(step + 1) / warmup_steps for step in range(3)])


def test_adamw_has_the_configured_settings() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1.0, betas=(0.8, 0.95), weight_decay=0.1))
    (group,) = optimizer.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.95), 0.1)
    set_learning_rate(optimizer, 0.5)
    before = model.weight.item()
    model.weight.grad = torch.tensor([[3.0]])
    optimizer.step()
    # AdamW's first step has length lr, after the decay of lr · 0.1.
    assert model.weight.item() == pytest.approx(before * (1 - 0.05) - 0.5, abs=1e-5)
