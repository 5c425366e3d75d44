"""Tiny policies, and what transformers says about tokens that they chose."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, logging

from slipstream.models.digits import build_digits_model
from slipstream.rollout_servers.engines.base import Completion

CONTEXT = 4096
TURNS = 3
"""Versions that are `TURNS` apart have the same weights, so that many updates need few policies."""


@cache
def policy(turn: int, *, tied: bool) -> nn.Module:
    """A policy with peaked distributions, 7 MB, unlike those of the other turns."""
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
    )
    model: Any = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(turn)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1, generator=generator)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
    made: nn.Module = model.eval()
    return made


def policy_of(version: int, *, tied: bool) -> nn.Module:
    """The policy that is published as `version` in these tests; 0 is what `write_policy` writes."""
    return policy(version % TURNS, tied=tied)


def write_policy(folder: Path, *, tied: bool) -> None:
    """Writes version 0 with the digits tokenizer."""
    build_digits_model(folder, seed=0)
    logging.disable_progress_bar()
    model: Any = policy_of(0, tied=tied)
    model.save_pretrained(folder)


@torch.no_grad()
def distributions(
    model: nn.Module, prompt_ids: Sequence[int], token_ids: Sequence[int], *, temperature: float
) -> Tensor:
    """log-probs of every token at each place of the answer, shape [T, V], by transformers."""
    ids = torch.tensor([[*prompt_ids, *token_ids]])
    logits = model(ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    every: Tensor = (logits / temperature).log_softmax(-1)
    return every


def distance(
    answer: Completion, model: nn.Module, prompt_ids: Sequence[int], start: int, end: int, *, temperature: float
) -> float:
    """Mean |Δ| between the engine's log-probs of tokens [start, end) and those that transformers gives them."""
    every = distributions(model, prompt_ids, answer.token_ids, temperature=temperature)
    expected = every.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    return (torch.tensor(answer.logprobs) - expected)[start:end].abs().mean().item()


def scores(model: nn.Module, token_ids: Sequence[int]) -> list[float]:
    """log-prob of each token but the first, given those before it, by transformers."""
    every = distributions(model, token_ids[:1], token_ids[1:], temperature=1.0)
    given: list[float] = every.gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
    return given
