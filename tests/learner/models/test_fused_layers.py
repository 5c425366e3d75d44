"""Norms and rotary embeddings in few passes: the models' own results and gradients, or the models' own layers."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.learner.models.fused_layers import fuse_layers, rms_norm, rotary

TINY: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "attn_implementation": "eager",
}  # fmt: skip


def loss_and_gradients(model: torch.nn.Module) -> list[Tensor]:
    ids = torch.arange(24).reshape(2, 12) % 32
    logits = model(input_ids=ids, use_cache=False).logits
    loss = logits.log_softmax(-1)[..., 3].square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize(("family", "norms"), [("qwen3", 9), ("llama", 5), ("glm4_moe", 5), ("gemma2", 0)])
def test_model_computes_the_same(family: str, norms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    source: Any = sys.modules[type(model).__module__]
    monkeypatch.setattr(source, "apply_rotary_pos_emb", source.apply_rotary_pos_emb)  # to put it back in the end
    expected = loss_and_gradients(model)
    fuse_layers(model)
    assert sum("forward" in vars(part) for part in model.modules()) == norms, "Gemma's norm has another formula"
    assert source.apply_rotary_pos_emb is rotary
    for found, wanted in zip(loss_and_gradients(model), expected, strict=True):
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_gradients_are_those_of_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    torch.autograd.gradcheck(lambda states, weight: rms_norm(states, weight, 0.1), (random(2, 3, 6), random(6)))
    angle = torch.rand(1, 3, 8, generator=generator, dtype=torch.float64)
    for size in (8, 10):  # all features, or the first ones
        given = random(1, 2, 3, size), random(1, 1, 3, size)
        torch.autograd.gradcheck(lambda query, key: rotary(query, key, angle.cos(), angle.sin()), given)


def test_frozen_weight_gets_no_gradient() -> None:
    states, weight = torch.randn(4, 6, requires_grad=True), torch.ones(6)
    rms_norm(states, weight, 1e-6).sum().backward()
    assert states.grad is not None and weight.grad is None
