"""Floating-point operations of training on token sequences, by the shape of the model, and the peaks of known GPUs.

Counted are the matrix products of one forward and one backward pass over what is trained on: 2 operations for each
weight that a token is multiplied by, and in attention 2 for each element of keys and values for each pair of a query
and a key, of which causal attention has half of the square. A backward pass has twice as many: for the gradient of the
inputs, and of the weights. In a mixture of experts a token is multiplied by the experts that it is sent to. The head is
applied to actions alone. Not counted are recomputed activations, passes that only score (log-probs and values before
the first update, the reference), the optimizer, image encoders, states of recurrent layers, and padding.

Source: Kaplan et al. 2020, arXiv 2001.08361, section 2.1; for the attention's part PaLM, arXiv 2204.02311, appendix B,
with the causal half of the pairs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from slipstream.learner.models.footprint import EXPERT_DIMENSIONS
from slipstream.learner.models.layers import decoder_of
from slipstream.models.architecture import expert_count, experts_per_token

MATRIX_DIMENSIONS: Final = 2

PEAK_FLOPS_PER_S: Final = (
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200 NVL", 836e12),
    ("H200", 989e12),
    ("H100 NVL", 836e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("A10", 125e12),
)
"""Dense bfloat16 products with float32 sums, from NVIDIA's data sheets (half of the figures with sparsity), by what is
in the card's name; the first that fits."""


def peak_flops_per_s(gpu: str, dtype: str) -> float | None:
    """Peak of a GPU by its name; None for an unknown one, and for other types than bfloat16."""
    words = gpu.replace("-", " ").split()
    if dtype != "bfloat16":
        return None
    return next((peak for name, peak in PEAK_FLOPS_PER_S if _contains(words, name.split())), None)


def _contains(words: Sequence[str], part: Sequence[str]) -> bool:
    return any(list(words[start : start + len(part)]) == list(part) for start in range(len(words)))


@dataclass(frozen=True)
class ModelFlops:
    """Operations of a forward and backward pass of one model."""

    trained_weights: float
    """Weights that a token is multiplied by in the layers and that have a gradient."""
    frozen_weights: float
    """Those without: used once in the backward pass, for the gradient of their inputs."""
    head_weights: float
    """Weights that an action is multiplied by."""
    head_is_trained: bool
    pair_operations: float
    """Operations for a pair of a query and a key in a layer, in a forward pass."""
    windows: Mapping[int | None, int]
    """Number of layers by how many tokens they attend to; None: all."""

    @classmethod
    def of_model(cls, model: Any) -> Self:
        """Operations of a causal language model of transformers, with adapters where it has any, or of a critic."""
        layers, head = decoder_of(model).layers, model.get_output_embeddings().weight
        text = model.config.get_text_config(decoder=True)
        experts = expert_count(text)
        share = experts_per_token(text) / experts if experts else 0.0
        trained = frozen = 0.0
        for parameter in layers.parameters():
            used = parameter.numel() * _used_share(tuple(parameter.shape), experts, share)
            trained, frozen = (trained + used, frozen) if parameter.requires_grad else (trained, frozen + used)
        return cls(
            trained_weights=trained,
            frozen_weights=frozen,
            head_weights=float(head.numel()),
            head_is_trained=head.requires_grad,
            pair_operations=2.0 * sum(_head_sizes(text)),
            windows=_windows(text),
        )

    def __call__(self, lengths: Sequence[int], *, actions: int, before: Sequence[int] | None = None) -> float:
        """Operations for sequences of these numbers of input tokens with so many actions together.

        Args:
            before: tokens before each sequence to which it attends, but which are counted elsewhere; None: none.
        """
        sizes = np.array(lengths, dtype=np.float64)
        starts = np.zeros_like(sizes) if before is None else np.array(before, dtype=np.float64)
        pairs = sum(
            layers * (_pairs(starts + sizes, window) - _pairs(starts, window))
            for window, layers in self.windows.items()
        )
        products = (3 * self.trained_weights + 2 * self.frozen_weights) * float(sizes.sum())
        head = (3 if self.head_is_trained else 2) * self.head_weights * actions
        return 2 * (products + head) + 3 * self.pair_operations * pairs


def _used_share(shape: tuple[int, ...], experts: int, share: float) -> float:
    """Part of a parameter that a token is multiplied by: all of a matrix, nothing of a vector.

    Args:
        share: of a layer's experts, for one token.
    """
    if len(shape) == EXPERT_DIMENSIONS:
        return share if shape[0] == experts else 0.0  # else a convolution's kernel
    return 1.0 if len(shape) == MATRIX_DIMENSIONS else 0.0


def _head_sizes(text: Any) -> tuple[int, int]:
    """Elements of a query or key, and of a value, in all heads; 0 without attention."""
    heads = getattr(text, "num_attention_heads", None) or 0
    if getattr(text, "kv_lora_rank", None):  # latent attention
        return heads * (text.qk_nope_head_dim + text.qk_rope_head_dim), heads * text.v_head_dim
    size = getattr(text, "head_dim", None)
    return (heads * size,) * 2 if size else (text.hidden_size if heads else 0,) * 2


def _windows(text: Any) -> Mapping[int | None, int]:
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    window, chunk = getattr(text, "sliding_window", None), getattr(text, "attention_chunk_size", None)
    of_kind = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
    return Counter(of_kind[kind] for kind in kinds if kind in of_kind)


def _pairs(lengths: NDArray[np.float64], window: int | None) -> float:
    """Pairs of a query and a key that is not after it, among the last `window` ones."""
    bounded = lengths if window is None else np.minimum(lengths, window)
    return float((bounded * (bounded + 1) / 2 + (lengths - bounded) * bounded).sum())
