"""Policies with random weights, in the shape of Qwen3, and small changes of them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config, logging

from slipstream.learner.models import attention

HEAD_DIM = 64
CONTEXT = 1024
LAYERS = 14
NUDGE = 1.01
"""More than the step between two neighbours in bfloat16: whatever is multiplied by it changes."""


@dataclass(frozen=True)
class Shape:
    """The sizes that make a Qwen3."""

    vocabulary: int
    hidden: int
    layers: int


TINY = Shape(vocabulary=32, hidden=64, layers=2)
SMALL = Shape(vocabulary=8192, hidden=512, layers=8)
QWEN3_0_6B = Shape(vocabulary=151_936, hidden=1024, layers=28)


def shape_of(parameters: int) -> Shape:
    """A shape of about so many parameters, and at least a quarter of a million."""
    # A layer has 15 hidden² of them, vocabulary and head together 32 hidden² here.
    hidden = math.isqrt(parameters // (15 * LAYERS + 32))
    hidden = max(32, round(hidden / 32) * 32)
    return Shape(vocabulary=16 * hidden, hidden=hidden, layers=LAYERS)


def build_policy(shape: Shape) -> nn.Module:
    """The policy, fp32 as a learner holds it."""
    attention.register()
    heads = max(1, shape.hidden // 32)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    built: nn.Module = model.eval().requires_grad_(False)
    return built


def write_policy(model: nn.Module, folder: Path) -> None:
    """Writes it as version 0, for an engine that needs no tokenizer."""
    logging.disable_progress_bar()
    writable: Any = model
    writable.save_pretrained(folder)


def change(model: nn.Module, share: float, generator: torch.Generator) -> None:
    """Changes about this share of each tensor's numbers, anywhere in it; below 1, as numbers are drawn repeatedly.

    `generator` is one of the device that the model lies on.
    """
    for parameter in model.parameters():
        flat = parameter.view(-1)
        drawn = round(-math.log1p(-share) * flat.numel())
        places = torch.randint(flat.numel(), (drawn,), generator=generator, device=flat.device)
        flat[places] = flat[places] * NUDGE
