"""The learning-rate schedule, and AdamW."""

from typing import Any

import pytest
import torch

from slipstream.configs.schema.learner import OptimizerConfig
from slipstream.learner.models.optim import build_optimizer, learning_rate, set_learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            {"warmup_steps": 4, "final_lr_fraction": 0.2},
            [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4],
        ),
        ({"warmup_steps": 0, "final_lr_fraction": 1.0}, [1.0] * 5),
        ({"warmup_steps": 0}, [1.0, 0.75, 0.5, 0.25]),
        ({"warmup_steps": 3}, [1 / 3, 2 / 3, 1.0]),
        ({"warmup_steps": 50}, [1 / 50, 2 / 50, 3 / 50]),
    ],
)
def test_learning_rate_warms_up_then_decays(schedule: dict[str, Any], expected: list[float]) -> None:
    config, steps = OptimizerConfig(lr=1.0, **schedule), len(expected)
    assert [learning_rate(step, steps=steps, config=config) for step in range(steps)] == pytest.approx(expected)


def test_adamw_has_configured_settings() -> None:
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
