"""The learning-rate schedule, and the optimizers."""

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.learner import OptimizerConfig
from slipstream.learner.models.optim import build_optimizer, learning_rate, set_learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"warmup_steps": 4, "final_lr_fraction": 0.2}, [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4]),
        ({"warmup_steps": 0, "final_lr_fraction": 1.0}, [1.0] * 5), ({"warmup_steps": 0}, [1.0, 0.75, 0.5, 0.25]),
        ({"warmup_steps": 3}, [1 / 3, 2 / 3, 1.0]), ({"warmup_steps": 50}, [1 / 50, 2 / 50, 3 / 50]),
    ],
)  # fmt: skip
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


def one_step(optimizer: str, model: nn.Module) -> dict[str, float]:
    """Root mean square of each parameter's change by an update with lr 0.1 along random gradients."""
    built = build_optimizer(model, OptimizerConfig(name=optimizer, lr=1.0))
    set_learning_rate(built, 0.1)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for each in model.parameters():
        each.grad = torch.randn(each.shape, generator=generator) if each.requires_grad else None
    built.step()
    return {
        name: (each.detach() - before[name]).square().mean().sqrt().item() for name, each in model.named_parameters()
    }


def small_model() -> nn.Module:
    layer = nn.ModuleDict({"product": nn.Linear(64, 32), "frozen": nn.Linear(8, 8)})
    layer["frozen"].requires_grad_(False)
    return nn.ModuleDict(
        {"embedding": nn.Embedding(80, 64), "layers": nn.ModuleList([layer]), "head": nn.Linear(64, 1)}
    )


def test_muon_updates_matrices_of_layers_at_the_scale_of_adamw() -> None:
    changes = one_step("muon", small_model())
    # AdamW's first update changes every weight by lr, but for where the gradient is near 0.
    for name in ("embedding.weight", "layers.0.product.bias", "head.weight", "head.bias"):
        assert changes[name] == pytest.approx(0.1, rel=1e-3), name
    # An orthogonal update of 32 rows, scaled by 0.2 √64: each weight by 0.2 lr, as AdamW's later updates.
    assert changes["layers.0.product.weight"] == pytest.approx(0.02, rel=0.2)
    assert changes["layers.0.frozen.weight"] == changes["layers.0.frozen.bias"] == 0


def test_adamw_8bit_without_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"learner\.optimizer\.name=adamw_8bit.*slipstream\[torchao\]"):
        build_optimizer(small_model(), OptimizerConfig(name="adamw_8bit"))


@pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs the extra torchao, which slows every process that imports transformers"
)
def test_adamw_8bit_updates_as_adamw() -> None:
    changes = one_step("adamw_8bit", small_model())
    assert changes["embedding.weight"] == pytest.approx(0.1, rel=0.01)
    assert changes["layers.0.frozen.weight"] == 0
