"""Exact attention within packed sequences, without a T x T mask: by torch's SDPA, on GPUs by faster kernels.

# N sequences of one length L, in B blocks of W; H heads, T packed tokens, D head size of queries and keys, V of values,
# Q queries and K keys of a call of a kernel (in blocks: K = 2 W, M = N (B - 1)), E = D + 8
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.data.prefix_tree import PrefixTree
from slipstream.learner.models.attention_kernels import ANY, Call, Choice, Machine, choose, flex, varlen
from slipstream.learner.models.attention_tree import is_short, tree_attention, tree_forms, visible_pairs
from slipstream.learner.parallel.context import exchanging

log = get_log("learner.model")

NAME = "segments"
FLASH = ("flash_attention_2", "flash_attention_3")

NO_TREES = "only flex attention computes trees of shared prefixes on a GPU as fast as sequences; each is computed alone"

SCORES_AT_ONCE = 2**24
"""Soft-capped scores of so many pairs of query and key are in memory at a time, some copies of them in fp32."""
_ALIGNMENT = 8  # head sizes that the GPU's kernels compute without a copy are multiples of it


def register() -> None:
    """Registers the attentions of `learner.attention` in transformers, as `attn_implementation`.

    They and those of flash-attention also take `context`, for tokens that are split over ranks.
    """
    own: dict[str, Any] = {each: partial(packed_attention, requested=each) for each in (ANY, "varlen", "flex")}
    own[NAME] = segments_attention
    for name, attention in (own | dict.fromkeys(FLASH, flash_attention_forward)).items():
        # Not compiled: it would be again for each list of lengths.
        ALL_ATTENTION_FUNCTIONS.register(name, torch.compiler.disable(exchanging(attention)))
    for name in own:
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, segments_mask)


@dataclass(frozen=True)
class Window:
    """Limit of a token's attention to earlier tokens of its sequence."""

    tokens: int
    """Maximal number, the token itself included."""
    chunked: bool
    """True: only tokens of the same chunk, of so many tokens each."""


def segments_mask(*, config: Any, local_size: int | None = None, **_unused: Any) -> Window | None:
    """The mask that transformers passes to attention: here the layer's window, None if it has none."""
    if local_size is None:
        return None
    return Window(local_size, chunked=getattr(config, "attention_chunk_size", None) == local_size)


def packed_attention(  # noqa: PLR0913  (transformers calls it)
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | Tensor | None,
    *,
    segment_lengths: Sequence[int],
    tree: PrefixTree | None = None,
    requested: str = ANY,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, by the kernel that suits device and model.

    Args and result: as `segments_attention`, and

        requested: a kernel, or "auto".
        cu_seq_lens_q: 0 and the ends of the sequences, int32, on the device.

    Raises: ConfigError when the requested kernel can't compute it.
    """
    call = Call(
        query.dtype, query.shape[-1], softcap=softcap is not None, sinks=s_aux is not None, dropout=dropout > 0,
        tree=tree is not None,
    )  # fmt: skip
    backend = _chosen(requested, call, Machine.of(query.device)).backend
    if backend == NAME:
        return segments_attention(
            module, query, key, value, attention_mask,
            segment_lengths=segment_lengths, tree=tree, scaling=scaling, dropout=dropout, softcap=softcap, s_aux=s_aux,
        )  # fmt: skip
    lengths, window = _limits(attention_mask, segment_lengths, tree)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    if backend == "varlen":
        ends = cu_seq_lens_q if lengths is segment_lengths else None
        return varlen(query, key, value, lengths, window=window, scaling=factor, ends=ends), None
    trees = PrefixTree.of_sequences(lengths) if tree is None else tree
    out = flex(query, key, value, trees, window=window, scaling=factor, softcap=softcap, sinks_H=s_aux)
    return out, None


@cache
def _chosen(requested: str, call: Call, machine: Machine) -> Choice:
    """The choice of a kernel, logged once for each kind of call."""
    choice = choose(requested, call, machine)
    log.info(
        "attention over packed sequences", kernel=choice.backend, why=choice.reason, dtype=str(call.dtype),
        head_size=call.head_size, softcap=call.softcap, sinks=call.sinks,
    )  # fmt: skip
    return choice


def segments_attention(  # noqa: PLR0913  (transformers calls it)
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | Tensor | None,
    *,
    segment_lengths: Sequence[int],
    tree: PrefixTree | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, by a call of SDPA for each run of equal lengths.

    Args:
        query, key: [1, H, T, D]; key and value may have fewer heads.
        value: [1, H, T, V].
        attention_mask: the window; None: the whole sequence. Not a tensor: boundaries are in `segment_lengths`.
        segment_lengths: lengths of the packed sequences; they sum to T.
        tree: the trees of which they are the nodes: a token also sees the ancestors of its own; None: it does not.
        scaling: factor of the scores, 1/sqrt(D) if None.
        softcap: scores s become softcap * tanh(s / softcap).
        s_aux: attention sinks [H]: the score of one more key, with a value of 0.

    Returns: [1, T, H, V], and None for the attention weights.
    """
    segment_lengths, window = _limits(attention_mask, segment_lengths, tree)
    kernel = _Kernel(query.shape[-1] ** -0.5 if scaling is None else scaling, dropout, s_aux)
    if tree is not None:
        if query.device.type != "cpu":
            raise ConfigError(NO_TREES)
        forms = tree_forms(tree)
        in_window = softcap is None and (window is None or tree.height <= window)
        if in_window and all(is_short(form) or kernel.plain for form, _ in forms):
            return kernel.by_forms(query, key, value, forms), None
        return kernel.by_paths(query, key, value, tree, window, softcap), None
    runs = [(length, sum(1 for _ in run)) for length, run in groupby(segment_lengths)]
    pieces = []
    # Consecutive sequences of one length are a plain batch; packing sorts by length to make such runs long.
    for (length, _), states in zip(runs, _batches(query, key, value, runs), strict=True):
        if softcap is not None:
            out_NHLV = kernel.soft_capped(*states, window, softcap)
        elif window is None or length <= window:
            out_NHLV = kernel.causal(*states)
        else:
            out_NHLV = kernel.windowed(*states, window)
        pieces.append(out_NHLV.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces).unsqueeze(0), None


def _batches(
    query: Tensor, key: Tensor, value: Tensor, runs: Sequence[tuple[int, int]]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The states of each run of sequences, of which length and number are given, [N, H, L, D]."""
    # Split, not sliced: a slice's backward pass fills a gradient of all tokens. Tokens first, as in the projections.
    states_THD = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    parts = zip(*(each.split([length * count for length, count in runs]) for each in states_THD), strict=True)
    for (length, count), part in zip(runs, parts, strict=True):
        query_NHLD, key_NHLD, value_NHLV = (each.unflatten(0, (count, length)).transpose(1, 2) for each in part)
        yield query_NHLD, key_NHLD, value_NHLV


def _limits(
    mask: Window | Tensor | None, lengths: Sequence[int], tree: PrefixTree | None
) -> tuple[Sequence[int], int | None]:
    """Lengths of the sequences, or of the chunks to which attention is limited, and its window within them."""
    if isinstance(mask, Tensor):
        raise ValueError("packed attention takes segment_lengths, not a mask")
    if mask is None:
        return lengths, None
    if mask.chunked:
        if tree is not None:
            raise ValueError("attention within chunks does not share prefixes")
        return list(_chunks(lengths, mask.tokens)), None
    return lengths, mask.tokens


@dataclass(frozen=True)
class _Kernel:
    """Attention within sequences of one length, in memory that is linear in their length."""

    scaling: float
    dropout: float
    sinks_H: Tensor | None

    @property
    def plain(self) -> bool:
        """True if the kernel for trees can compute it."""
        return self.sinks_H is None and not self.dropout

    def by_forms(
        self, query_1HTD: Tensor, key_1HTD: Tensor, value_1HTV: Tensor, forms: Sequence[tuple[PrefixTree, int]]
    ) -> Tensor:
        """Attention within trees, short ones of one form in one call, [1, T, H, V]."""
        if len(forms) == 1 and not is_short(forms[0][0]):
            return tree_attention(query_1HTD, key_1HTD, value_1HTV, forms[0][0], self.scaling)
        runs = [(sum(form.lengths), count) for form, count in forms]
        pieces = []
        for (form, _), states in zip(forms, _batches(query_1HTD, key_1HTD, value_1HTV, runs), strict=True):
            if is_short(form):
                out_NLHV = self._sdpa(*states, visible_pairs(form)).transpose(1, 2)
            else:
                out_NLHV = tree_attention(*states, form, self.scaling)
            pieces.append(out_NLHV.flatten(0, 1))
        return torch.cat(pieces)[None]

    def causal(self, query_NHLD: Tensor, key_NHLD: Tensor, value_NHLV: Tensor) -> Tensor:
        """Attention to the whole sequence."""
        return self._sdpa(query_NHLD, key_NHLD, value_NHLV, None)

    def windowed(self, query_NHLD: Tensor, key_NHLD: Tensor, value_NHLV: Tensor, window: int) -> Tensor:
        """Attention to `window` tokens of longer sequences.

        A block of `window` queries attends only to its own keys and those of the block before.
        """
        batch, heads, length, _ = query_NHLD.shape
        # On GPUs only the kernel that materialises all scores supports both a mask and fewer key heads.
        key_NHLD, value_NHLV = _repeated(key_NHLD, heads), _repeated(value_NHLV, heads)
        query_NBHWD, key_NBHWD, value_NBHWV = (
            F.pad(states, (0, 0, 0, -length % window)).unflatten(2, (-1, window)).transpose(1, 2)
            for states in (query_NHLD, key_NHLD, value_NHLV)
        )
        first_NHWV = self._sdpa(query_NBHWD[:, 0], key_NBHWD[:, 0], value_NBHWV[:, 0], None)
        both_WK = torch.ones(window, 2 * window, dtype=torch.bool, device=query_NHLD.device).tril(window).triu(1)
        key_MHKD, value_MHKV = (
            torch.cat([states[:, :-1], states[:, 1:]], dim=3).flatten(0, 1) for states in (key_NBHWD, value_NBHWV)
        )
        rest_MHWV = self._sdpa(query_NBHWD[:, 1:].flatten(0, 1), key_MHKD, value_MHKV, both_WK)
        out_NBHWV = torch.cat([first_NHWV[:, None], rest_MHWV.unflatten(0, (batch, -1))], dim=1)
        return out_NBHWV.transpose(1, 2).flatten(2, 3)[:, :, :length]

    def soft_capped(
        self, query_NHLD: Tensor, key_NHLD: Tensor, value_NHLV: Tensor, window: int | None, softcap: float
    ) -> Tensor:
        """Attention with soft-capped scores, which no kernel of torch has."""
        _, heads, length, _ = query_NHLD.shape
        keys = length if window is None else min(length, 2 * window)
        rows = min(window or length, max(1, SCORES_AT_ONCE // (heads * keys)))
        at_once = max(1, SCORES_AT_ONCE // (heads * keys * rows))
        states = (states.split(at_once) for states in (query_NHLD, key_NHLD, value_NHLV))
        return torch.cat(
            [
                self._by_blocks(query, key, value, rows, window, softcap)
                for query, key, value in zip(*states, strict=True)
            ]
        )

    def by_paths(
        self,
        query_1HTD: Tensor,
        key_1HTD: Tensor,
        value_1HTV: Tensor,
        tree: PrefixTree,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention of the tokens of each node to the keys on the path to it, [1, T, H, V]."""
        nodes = [slice(start, start + length) for start, length in zip(tree.starts, tree.lengths, strict=True)]
        pieces = []
        for node, own in enumerate(nodes):
            path = [nodes[each] for each in tree.path(node)]
            key, value = (torch.cat([states[:, :, part] for part in path], dim=2) for states in (key_1HTD, value_1HTV))
            keys = key.shape[2] if window is None else min(key.shape[2], 2 * window)
            rows = min(window or tree.lengths[node], max(1, SCORES_AT_ONCE // (query_1HTD.shape[1] * keys)))
            pieces.append(self._by_blocks(query_1HTD[:, :, own], key, value, rows, window, softcap))
        return torch.cat(pieces, dim=2).transpose(1, 2)

    def _by_blocks(
        self,
        query_NHQD: Tensor,
        key_NHKD: Tensor,
        value_NHKV: Tensor,
        rows: int,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention of the queries of the last tokens, for blocks of `rows`; capped scores are recomputed backward."""
        length, before = query_NHQD.shape[2], key_NHKD.shape[2] - query_NHQD.shape[2]
        blocks = []
        for start in range(0, length, rows):
            end = min(start + rows, length)
            first = 0 if window is None else max(0, before + start + 1 - window)
            states = (
                query_NHQD[:, :, start:end],
                key_NHKD[:, :, first : before + end],
                value_NHKV[:, :, first : before + end],
            )
            offset = before + start - first
            if softcap is None:
                out_NHQV = self._sdpa(*states, _visible(states[0], states[1], offset, window))
            else:
                block = partial(self._block, offset=offset, window=window, softcap=softcap)
                out_NHQV = checkpoint(block, *states, use_reentrant=False, preserve_rng_state=self.dropout > 0)
            blocks.append(out_NHQV)
        return torch.cat(blocks, dim=2)

    def _block(
        self,
        query_NHQD: Tensor,
        key_NHKD: Tensor,
        value_NHKV: Tensor,
        *,
        offset: int,
        window: int | None,
        softcap: float,
    ) -> Tensor:
        """Attention of queries from all scores. Query i may see the keys up to i + `offset`, `window` of them."""
        exact = torch.promote_types(query_NHQD.dtype, torch.float32)
        key_NHKD, value_NHKV = (_repeated(states, query_NHQD.shape[1]) for states in (key_NHKD, value_NHKV))
        scores_NHQK = (query_NHQD @ key_NHKD.transpose(2, 3)).to(exact) * self.scaling
        scores_NHQK = softcap * torch.tanh(scores_NHQK / softcap)
        visible_QK = _visible(query_NHQD, key_NHKD, offset, window)
        scores_NHQK = scores_NHQK.masked_fill(~visible_QK, float("-inf"))
        if self.sinks_H is not None:
            sinks_NHQ1 = self.sinks_H.to(exact)[None, :, None, None].expand(*scores_NHQK.shape[:3], 1)
            scores_NHQK = torch.cat([scores_NHQK, sinks_NHQ1], dim=3)
        weights_NHQK = scores_NHQK.softmax(-1)[..., : key_NHKD.shape[2]].to(value_NHKV.dtype)
        return F.dropout(weights_NHQK, self.dropout) @ value_NHKV

    def _sdpa(self, query_NHQD: Tensor, key_NHKD: Tensor, value_NHKV: Tensor, visible_QK: Tensor | None) -> Tensor:
        """torch's attention, causal if there is no mask."""
        size = value_NHKV.shape[-1]
        skipped = 0
        if self.sinks_H is not None:
            # The sink is a first key of 1 in features of its own, where queries have its score and the keys have 0.
            score_H = self.sinks_H.to(query_NHQD.dtype) / self.scaling
            score_NHQ1 = score_H[None, :, None, None].expand(*query_NHQD.shape[:3], 1)
            query_NHQD = F.pad(torch.cat([query_NHQD, score_NHQ1], dim=3), (0, _ALIGNMENT - 1))
            sink_NH1E = F.pad(key_NHKD.new_ones(*key_NHKD.shape[:2], 1, 1), (key_NHKD.shape[3], _ALIGNMENT - 1))
            key_NHKD = torch.cat([sink_NH1E, F.pad(key_NHKD, (0, _ALIGNMENT))], dim=2)
            value_NHKV = F.pad(value_NHKV, (0, 0, 1, 0))
            if visible_QK is not None:
                visible_QK = F.pad(visible_QK, (1, 0), value=True)
            else:
                # As many queries as keys, which is what a causal kernel takes; the first sees only the sink.
                query_NHQD, skipped = F.pad(query_NHQD, (0, 0, 1, 0)), 1
        if query_NHQD.device.type == "cuda" and query_NHQD.dtype == torch.float32:
            # There only the kernel that materialises all scores supports fewer key heads.
            key_NHKD, value_NHKV = (_repeated(states, query_NHQD.shape[1]) for states in (key_NHKD, value_NHKV))
        if size < query_NHQD.shape[-1]:  # kernels that keep no scores take values of the keys' size
            value_NHKV = F.pad(value_NHKV, (0, query_NHQD.shape[-1] - size))
        out_NHQV = F.scaled_dot_product_attention(
            query_NHQD,
            key_NHKD,
            value_NHKV,
            attn_mask=visible_QK,
            dropout_p=self.dropout,
            is_causal=visible_QK is None,
            scale=self.scaling,
            enable_gqa=query_NHQD.shape[1] != key_NHKD.shape[1],
        )
        return out_NHQV[:, :, skipped:, :size]


def _visible(query_NHQD: Tensor, key_NHKD: Tensor, offset: int, window: int | None) -> Tensor:
    """Mask by which query i sees the keys up to i + `offset`, `window` of them."""
    shape = (query_NHQD.shape[2], key_NHKD.shape[2])
    visible_QK = torch.ones(shape, dtype=torch.bool, device=query_NHQD.device).tril(offset)
    return visible_QK if window is None else visible_QK.triu(offset + 1 - window)


def _repeated(states_NhLD: Tensor, heads: int) -> Tensor:
    """Keys or values with a copy for each of so many query heads."""
    return states_NhLD.repeat_interleave(heads // states_NhLD.shape[1], dim=1)


def _chunks(lengths: Sequence[int], most: int) -> Iterator[int]:
    """Lengths of the chunks of sequences; only a sequence's last may be shorter than `most`."""
    for length in lengths:
        yield from (min(most, length - start) for start in range(0, length, most))
