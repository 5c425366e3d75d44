"""Attention over packed sequences: causal within each sequence, limited to the model's window."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from slipstream.learner.data.prefix_tree import PrefixTree
from slipstream.learner.models import attention, attention_tree
from slipstream.learner.models.attention import Window, segments_attention

HEAD_DIM = 8
SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
WINDOW = 5
TREE = PrefixTree((7, 5, 3, 3, 4, 6, 2, 9), (-1, 0, 1, 1, 0, -1, 5, -1))
"""Three levels, two nodes of one length side by side, and a sequence that shares nothing."""
EQUAL = PrefixTree((4, 2, 2, 4, 2, 2, 3, 5), (-1, 0, 0, -1, 3, 3, -1, -1))
"""Two trees of one form, then sequences."""
LENGTHS = [[5], [7, 7, 7], [9, 4, 4, 1], [1, 6, 1], [3, 8, 3]]


def random_states(lengths: Sequence[int], *, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    query, key, value = (
        torch.randn(1, count, sum(lengths), HEAD_DIM, generator=generator, dtype=torch.float64, requires_grad=True)
        for count in (heads, key_heads, key_heads)
    )
    return query, key, value


def visible_pairs(tree: PrefixTree, window: int | None) -> Tensor:
    """Pairs of query and key, from each token's path to its root."""
    visible = torch.zeros(sum(tree.lengths), sum(tree.lengths), dtype=torch.bool)
    for node, (start, length) in enumerate(zip(tree.starts, tree.lengths, strict=True)):
        path = [
            at for each in tree.path(node) for at in range(tree.starts[each], tree.starts[each] + tree.lengths[each])
        ]
        for token in range(start, start + length):
            seen = path[: path.index(token) + 1]
            visible[token, seen if window is None else seen[-window:]] = True
    return visible


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int] | PrefixTree,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention from all scores and a mask, [1, T, H, D]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    tree = lengths if isinstance(lengths, PrefixTree) else PrefixTree.of_sequences(lengths)
    visible = visible_pairs(tree, window)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=3)
    return (scores.softmax(-1)[..., : len(visible)] @ value).transpose(1, 2)


@pytest.mark.parametrize(
    ("packed", "short"),
    [*((PrefixTree.of_sequences(lengths), 0) for lengths in LENGTHS), (TREE, 0), (TREE, 10), (EQUAL, 128)],
    ids=str,
)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 3], ids=["whole", "window"])
@pytest.mark.parametrize("softcap", [None, 0.8], ids=["plain", "capped"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_output_and_gradients_equal_masked_attention(
    packed: PrefixTree,
    short: int,
    key_heads: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_tree, "SHORT", short)
    attention_tree.tree_forms.cache_clear()
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 60)  # of several blocks in a sequence
    states = random_states(packed.lengths, heads=4, key_heads=key_heads)
    sink = torch.linspace(-1, 2, 4, dtype=torch.float64, requires_grad=True) if sinks else None
    mask = None if window is None else Window(window, chunked=False)
    out, weights = segments_attention(
        torch.nn.Identity(), *states, mask, segment_lengths=packed.lengths, scaling=0.3, softcap=softcap, s_aux=sink,
        tree=packed if packed in (TREE, EQUAL) else None,
    )  # fmt: skip
    reference = masked_attention(*states, packed, 0.3, window, softcap, sink)
    torch.testing.assert_close(out, reference)
    assert weights is None
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    inputs = states if sink is None else (*states, sink)
    torch.testing.assert_close(
        torch.autograd.grad((out * direction).sum(), inputs), torch.autograd.grad((reference * direction).sum(), inputs)
    )


def test_mask_is_refused() -> None:
    states = random_states([4], heads=1, key_heads=1)
    with pytest.raises(ValueError, match="segment_lengths"):
        segments_attention(torch.nn.Identity(), *states, torch.ones(1, 1, 4, 4), segment_lengths=[4])


def build(model: Any, config: Any) -> Any:
    """The model with weights large enough that its attention matters."""
    torch.manual_seed(0)
    built = model(config).eval()
    for parameter in built.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return built


@torch.no_grad()
def logprobs(model: Any, implementation: str, lengths: list[int]) -> Tensor:
    """Of packed sequences of the same tokens, shape [T, V]."""
    model.set_attn_implementation(implementation)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    logits = model(
        input_ids=positions * 7 % SMALL["vocab_size"], position_ids=positions, use_cache=False,
        segment_lengths=tuple(lengths),
    ).logits  # fmt: skip
    found: Tensor = logits[0].log_softmax(-1)
    return found


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (PhimoeForCausalLM, PhimoeConfig(**SMALL, num_local_experts=2, sliding_window=WINDOW)),
        (
            Qwen2MoeForCausalLM,
            Qwen2MoeConfig(**SMALL, num_experts=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        ),
        (Llama4ForCausalLM, Llama4TextConfig(**SMALL, num_local_experts=2, attention_chunk_size=WINDOW)),
    ],
    ids=["phimoe", "qwen2-moe", "llama4-chunks"],
)
def test_attention_is_limited_to_window_of_model(model: Any, config: Any) -> None:
    built = build(model, config)
    attention.register()
    lengths = [WINDOW + 8, WINDOW + 1, WINDOW + 1, WINDOW, 2]
    alone = torch.cat([logprobs(built, "eager", [length]) for length in lengths])
    torch.testing.assert_close(logprobs(built, "segments", lengths), alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("softcap", [None, 30.0], ids=["plain", "capped"])
def test_memory_of_long_sequence_is_linear(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 2**14)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    length, heads = 512, 2
    query, key, value = random_states([length], heads=heads, key_heads=1)
    sinks = torch.zeros(heads, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = (query, key, value[..., :4])
        out, _ = segments_attention(
            torch.nn.Identity(), *states, None, segment_lengths=[length], softcap=softcap, s_aux=sinks
        )
    out.sum().backward()
    assert out.shape == (1, length, heads, 4)
    assert max(kept) < length * length / 4
