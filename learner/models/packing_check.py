"""Checks that packed sequences do not influence each other, and that they may share prefixes.

Layers with a state carry it from one sequence to the next; attention may reach beyond its window.

# N packed input tokens, D hidden size
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.learner.data.packing import MicroBatch, all_actions, pack
from slipstream.learner.data.prefix_tree import SHORT, PrefixSharing, build_tree
from slipstream.learner.models.moe import recorded_experts, replayed_experts
from slipstream.learner.parallel.context import ContextParallel

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.03}
"""Mean relative error of hidden states: larger than that of rounding, smaller than the influence of a neighbour."""

_LENGTHS = (13, 13, 10, 5)  # tokens; the longest first, as packing puts them
_WINDOW = 4  # tokens
_WINDOWS = ("sliding_window", "attention_chunk_size")


@contextmanager
def as_config_error(model: str) -> Iterator[None]:
    """Context in which any error of transformers or torch becomes a ConfigError: the learner can't train this model."""
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as error:  # a model that does not fit may raise anything
        raise ConfigError(f"{model} can't be trained by this learner: {type(error).__name__}: {error}") from error


@torch.no_grad()
def check_packing(
    decoder: Any,
    run: Callable[[MicroBatch], object],
    *,
    dtype: torch.dtype,
    device: torch.device,
    context: ContextParallel | None = None,
) -> None:
    """Compares packed sequences under the learner's attention with each alone under that of transformers; a collective.

    Attention windows are narrowed for the check, so that a few tokens show whether they are kept. The experts of packed
    tokens are those chosen alone: in bfloat16 rounding may change a choice, and with it a token's states altogether.

    Args:
        decoder: the part of a transformers model that has its layers.
        run: passes a share of a micro-batch through the model, as training will.
        context: the ranks over which training will split micro-batches.

    Raises: ConfigError when the hidden states differ, or the model fails.
    """
    name, config = type(decoder).__name__, decoder.config
    rng = np.random.default_rng(0)
    sequences = [all_actions(rng.integers(config.vocab_size, size=tokens)) for tokens in _LENGTHS]
    (together,) = pack(sequences, token_budget=sum(_LENGTHS))
    alone = [batch for sequence in sequences for batch in pack([sequence], token_budget=len(sequence.token_ids))]
    layer = _first_layer_of_last_kind(decoder)
    with as_config_error(name), _narrow_windows(decoder):
        with _attention(config, "eager"), recorded_experts(decoder) as experts:
            alone_ND = torch.cat([_hidden_states(layer, run, batch.to(device)) for batch in alone])
        for chosen_1NMK in experts:
            together = replace(together, routed_experts_1NMK=chosen_1NMK)
        with replayed_experts(decoder):
            packed_ND = _hidden_states(layer, run, together.to(device).split(context))
    off = _mean_error(packed_ND, alone_ND, context)
    if not off <= TOLERANCE[dtype]:  # NaN neither
        raise ConfigError(
            f"{name} can't be trained by this learner: the hidden states of packed sequences are off by {off:.1%} from "
            "what they are alone, as when a layer carries its state over to the next sequence or attention reaches "
            "beyond its window; choose another model"
        )


@torch.no_grad()
def prefix_error(
    decoder: Any,
    run: Callable[[MicroBatch], object],
    *,
    device: torch.device,
    context: ContextParallel | None = None,
) -> float:
    """Mean relative error of hidden states where sequences share prefixes, over those without; a collective.

    Arguments, and attention windows: as of `check_packing`.
    """
    sequences = [all_actions(tokens) for tokens in _branching(decoder.config.vocab_size)]
    budget = sum(len(sequence.token_ids) for sequence in sequences)
    (alone,), (shared,) = (pack(sequences, token_budget=budget, sharing=each) for each in (None, PrefixSharing(1)))
    placed_N = np.concatenate(build_tree([sequence.token_ids[:-1] for sequence in sequences]).positions)
    first_N = torch.from_numpy(np.unique(placed_N, return_index=True)[1]).to(device)
    layer = _first_layer_of_last_kind(decoder)
    with _narrow_windows(decoder):
        with recorded_experts(decoder) as experts:
            alone_ND = _hidden_states(layer, run, alone.to(device))[first_N]
        for chosen_1NMK in experts:
            shared = replace(shared, routed_experts_1NMK=chosen_1NMK[:, first_N])
        with replayed_experts(decoder):
            shared_ND = _hidden_states(layer, run, shared.to(device).split(context))
    return _mean_error(shared_ND, alone_ND, context)


def prefix_gradient_error(config: Any, *, dtype: torch.dtype, device: torch.device) -> float:
    """Relative error of the gradients of a model's attention where sequences share prefixes, over those without.

    Args:
        config: of the decoder.
    """
    # Long ones: attention to whole trees, as short ones have it, is that of transformers.
    inputs = [tokens[:-1].repeat(SHORT // 16) for tokens in _branching(1 << 20)]
    tree, positions = build_tree(inputs)
    at_N = torch.from_numpy(np.concatenate(positions)).to(device)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    generator = torch.Generator().manual_seed(0)
    key_heads = getattr(config, "num_key_value_heads", None) or heads

    def random(count: int, tokens: int) -> Tensor:
        return torch.randn(1, tokens, count, size, generator=generator).to(device, dtype)

    states = [
        random(count, sum(tree.lengths)).transpose(1, 2).requires_grad_() for count in (heads, key_heads, key_heads)
    ]
    direction_1NHD = random(heads, len(at_N))
    attend: Any = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    alone_1NHD, _ = attend(
        nn.Identity(), *(each[:, :, at_N] for each in states), None, segment_lengths=tuple(map(len, inputs))
    )
    shared_1THD, _ = attend(nn.Identity(), *states, None, segment_lengths=tree.lengths, tree=tree)
    expected = torch.autograd.grad(alone_1NHD, states, direction_1NHD)
    found = torch.autograd.grad(shared_1THD[:, at_N], states, direction_1NHD)
    errors = [(own - other).norm() / other.norm() for own, other in zip(found, expected, strict=True)]
    return float(torch.stack(errors).max())


def _branching(vocabulary: int) -> list[NDArray[np.int64]]:
    """Tokens of sequences that branch off from each other on three levels; the longest first, as packing puts them."""
    trunk = np.random.default_rng(0).integers(vocabulary, size=21)
    branch = np.concatenate([trunk[:12], (trunk[12:19] + 1) % vocabulary])
    return [
        trunk,
        branch,
        np.concatenate([branch[:15], (branch[15:18] + 1) % vocabulary]),
        np.concatenate([trunk[:7], (trunk[7:11] + 1) % vocabulary]),
    ]


def _mean_error(packed_ND: Tensor, alone_ND: Tensor, context: ContextParallel | None) -> float:
    """Mean relative error over all tokens; with a context, `packed_ND` are those of this rank's share."""
    start = 0 if context is None else context.rank * len(packed_ND)
    own_ND = alone_ND[start : start + len(packed_ND)]
    # Padding of the vocabulary may have embeddings of 0; at a sequence's start such a token has states of 0.
    error_N = (packed_ND[: len(own_ND)] - own_ND).norm(dim=-1) / own_ND.norm(dim=-1).clamp(min=1e-9)
    if context is not None:
        error_N = context.gather(error_N, start=min(start, len(alone_ND)), total=len(alone_ND))
    return float(error_N.mean())


def _hidden_states(layer: nn.Module, run: Callable[[MicroBatch], object], batch: MicroBatch) -> Tensor:
    """Output of a layer for a micro-batch, fp32, shape [N, D]."""
    outputs: list[Any] = []
    hook = layer.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        run(batch)
    finally:
        hook.remove()
    states_1ND: Tensor = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    return states_1ND[0].float()


def _first_layer_of_last_kind(decoder: Any) -> nn.Module:
    """The earliest layer up to which every kind of layer occurs.

    Not the last layer: over many layers the rounding of bfloat16 adds up, most where experts are chosen.
    """
    types = getattr(decoder.config, "layer_types", None) or [""] * len(decoder.layers)
    seen: set[tuple[str, ...]] = set()
    last = decoder.layers[0]
    for layer, kind in zip(decoder.layers, types, strict=False):
        parts = (kind, *sorted({type(module).__name__ for module in layer.modules()}))
        if parts not in seen:
            seen.add(parts)
            last = layer
    chosen: nn.Module = last
    return chosen


@contextmanager
def _attention(config: Any, name: str) -> Iterator[None]:
    """Context in which the model has another attention."""
    original = config._attn_implementation
    # Not by set_attn_implementation(), which reads the source of the class: FSDP has generated it.
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = original


@contextmanager
def _narrow_windows(decoder: Any) -> Iterator[None]:
    """Context in which attention windows and chunks are of a few tokens, in the config (for masks) and the layers."""
    originals = [
        (holder, name, tokens)
        for holder in (decoder.config, *decoder.modules())
        for name in _WINDOWS
        if isinstance(tokens := getattr(holder, name, None), int) and tokens > _WINDOW
    ]
    for holder, name, _ in originals:
        setattr(holder, name, _WINDOW)
    try:
        yield
    finally:
        for holder, name, tokens in originals:
            setattr(holder, name, tokens)
