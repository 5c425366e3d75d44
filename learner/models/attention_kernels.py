"""Kernels of attention over packed sequences on GPUs, and the choice of one for a call.

# H heads, T packed tokens, D head size of queries and keys, V of values, N sequences, G blocks of tokens
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.data.packing import moved
from slipstream.learner.data.prefix_tree import ROOT, PrefixTree

Backend = Literal["varlen", "flex", "segments"]
BACKENDS: tuple[Backend, ...] = ("varlen", "flex", "segments")
"""In the order of preference; the last one computes anything on any device."""
ANY = "auto"

BLOCK = 128
"""Tokens of a block of flex attention's mask."""
_FEWEST_BLOCKS = 2
"""torch would compile another kernel for one."""
_LEAST_CAPABILITY = (8, 0)
_LARGEST_HEAD, _LARGEST_HEAD_ON_SMALL_CHIPS = 256, 192
_SMALL_CHIPS = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
"""Their shared memory is too small for the backward pass of larger heads."""
_ALIGNMENT = 8
_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 has no such argument."""


@dataclass(frozen=True)
class Machine:
    """The properties of a device that decide which kernels run there."""

    device: str
    """Its type; "rocm" for what torch calls CUDA on AMD's GPUs."""
    capability: tuple[int, int] = (0, 0)
    triton: bool = False
    """The compiler of flex attention is installed."""

    @classmethod
    @cache
    def of(cls, device: torch.device) -> Self:
        """The properties of a device of this process."""
        if device.type != "cuda":
            return cls(device.type)
        name = "cuda" if torch.version.hip is None else "rocm"
        return cls(name, torch.cuda.get_device_capability(device), find_spec("triton") is not None)


@dataclass(frozen=True)
class Call:
    """The needs of a model's attention that decide which kernels can compute it."""

    dtype: torch.dtype
    head_size: int
    """Of queries and keys; that of values is at most the same."""
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False
    tree: bool = False
    """Sequences share prefixes."""


class Choice(NamedTuple):
    """A kernel, and why it was chosen."""

    backend: Backend
    reason: str
    """The preferred kernels that can't be used, and what they lack; empty if there is none."""


def choose(requested: str, call: Call, machine: Machine) -> Choice:
    """The kernel for a call: `requested`, or with "auto" the first of `BACKENDS` that can compute it.

    Raises: ConfigError when the requested one can't.
    """
    lacks = {backend: _lack(backend, call, machine) for backend in BACKENDS}
    if requested != ANY:
        (backend,) = (each for each in BACKENDS if each == requested)
        if (lack := lacks[backend]) is not None:
            raise ConfigError(f"learner.attention={requested}: {lack}; set learner.attention=auto")
        return Choice(backend, f"learner.attention={requested}")
    chosen = next(backend for backend in BACKENDS if lacks[backend] is None)
    earlier = BACKENDS[: BACKENDS.index(chosen)]
    without = {lack: [each for each in earlier if lacks[each] == lack] for lack in map(lacks.get, earlier)}
    return Choice(chosen, "; ".join(f"no {' or '.join(names)}: {lack}" for lack, names in without.items()))


def _lack(backend: Backend, call: Call, machine: Machine) -> str | None:
    """The reason for which a kernel can't compute a call; None if it can."""
    if backend == "segments":
        return None
    largest = _LARGEST_HEAD_ON_SMALL_CHIPS if machine.capability in _SMALL_CHIPS else _LARGEST_HEAD
    major, minor = machine.capability
    needs = {
        f"the device is {machine.device}, not cuda": machine.device == "cuda",
        f"the GPU has compute capability {major}.{minor}, below 8.0": machine.capability >= _LEAST_CAPABILITY,
        f"it computes no {str(call.dtype).removeprefix('torch.')}": call.dtype in (torch.bfloat16, torch.float16),
        "it has no dropout": not call.dropout,
        f"the head size {call.head_size} is above {largest}": call.head_size <= largest,
    }
    if backend == "flex":
        needs["triton is not installed"] = machine.triton
    else:
        needs["it has no trees of shared prefixes"] = not call.tree
        needs["it has no soft cap of scores"] = not call.softcap
        needs["it has no attention sinks"] = not call.sinks
        needs[f"the head size {call.head_size} is no multiple of {_ALIGNMENT}"] = call.head_size % _ALIGNMENT == 0
    return next((lack for lack, is_met in needs.items() if not is_met), None)


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    *,
    window: int | None,
    scaling: float,
    ends: Tensor | None = None,
) -> Tensor:
    """Causal attention within each sequence by torch's flash-attention, in one call; not on a CPU.

    Args:
        query, key: [1, H, T, D]; key and value may have fewer heads.
        value: [1, H, T, V].
        lengths: of the sequences; they sum to T.
        window: number of tokens that a token may see, itself included; None: all before it.
        ends: 0 and the sequences' ends, int32 on the device, shape [N + 1], if they are there.

    Returns: [1, T, H, V].
    """
    size, longest = value.shape[-1], max(lengths)
    value = F.pad(value, (0, query.shape[-1] - size))
    groups = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {"enable_gqa": True} if _TAKES_GROUPS else {}
    if groups > 1 and not _TAKES_GROUPS:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    if ends is None:
        ends = sequence_ends(tuple(lengths), query.device)
    # The kernel counts the tokens before the query's own.
    before = -1 if window is None or window >= longest else window - 1
    query_THD, key_THD, value_THD = (states[0].transpose(0, 1) for states in (query, key, value))
    out_THD: Any = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(before, 0),
        **options,
    )
    out: Tensor = out_THD[None, ..., :size]
    return out


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: PrefixTree,
    *,
    window: int | None,
    scaling: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention within trees by torch's compiled flex attention; on a CPU without gradient.

    Arguments and result: as `varlen`, but

        tree: the trees; sequences that share nothing are roots without children.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks_H: the score of one more key of each head, with a value of 0.
    """
    tokens = query.shape[2]
    mask = block_mask(tree, window, query.device)
    padded = (F.pad(states, (0, 0, 0, mask.seq_lengths[0] - tokens)) for states in (query, key, value))
    cap = None if softcap is None else _capped(softcap, query.device)
    out, logsumexp = _compiled_flex()(*padded, mask, scaling, cap, sinks_H is not None)
    if sinks_H is not None and logsumexp is not None:
        # The sink adds to the sum of the exponentials, and nothing to the output.
        out = out * torch.sigmoid(logsumexp - sinks_H.to(logsumexp.dtype)[None, :, None])[..., None].to(out.dtype)
    attended: Tensor = out[:, :, :tokens].transpose(1, 2)
    return attended


@cache
def _compiled_flex() -> Callable[..., tuple[Tensor, Tensor | None]]:
    # One kernel for all lengths, and an error where torch would go on without a compiled one.
    compiled: Callable[..., tuple[Tensor, Tensor | None]] = torch.compile(_flex, dynamic=True, fullgraph=True)
    return compiled


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scaling: float,
    cap: Callable[..., Tensor] | None,
    with_sum: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output [1, H, T, V], and with `with_sum` the logarithm of the sum of the exponentials of the scores [1, H, T]."""
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "flex attention is not compiled here, and would compute all pairs of tokens: let torch.compile work, or "
            "set learner.attention=segments"
        )
    given: dict[str, Any] = {"score_mod": cap, "block_mask": mask, "scale": scaling, "enable_gqa": True}
    if not with_sum:
        out: Any = flex_attention(query, key, value, **given)
        return out, None
    out, sums = flex_attention(query, key, value, return_aux=AuxRequest(lse=True), **given)
    return out, sums.lse


@cache
def _capped(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    # A tensor: with dynamic shapes a float becomes a symbol, which kernels do not take.
    most_1 = moved(torch.tensor([softcap]), device)

    def cap(score: Tensor, batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return most_1[batch] * torch.tanh(score / most_1[batch])  # of one batch

    return cap


@lru_cache(maxsize=4)
def block_mask(tree: PrefixTree, window: int | None, device: torch.device) -> BlockMask:
    """Flex attention's mask of packed trees, from their nodes alone: no pair of tokens is looked at.

    The tokens are padded to whole blocks; the padding is one more tree. All layers of a micro-batch share it.
    """
    tokens = sum(tree.lengths)
    padded = tree.padded(max(_FEWEST_BLOCKS * BLOCK - tokens, -tokens % BLOCK))
    # In preorder a node's descendants follow it: a token is seen by all that follow, up to the last descendant.
    seen_until_T = np.repeat(padded.ends, padded.lengths)
    position_T = _positions(padded)
    until_GB, position_GB = (each.reshape(-1, BLOCK) for each in (seen_until_T, position_T))
    blocks = len(until_GB)
    key_1G, query_G1 = np.arange(blocks)[None, :], np.arange(blocks)[:, None]
    # By the first query of a block and by its last one; between them a key is not seen again.
    seen_GG = (key_1G <= query_G1) & (until_GB.max(1) > query_G1 * BLOCK)
    whole_GG = (key_1G < query_G1) & (until_GB.min(1) >= (query_G1 + 1) * BLOCK)
    if window is not None:
        seen_GG &= position_GB.min(1)[:, None] - position_GB.max(1) < window
        whole_GG &= position_GB.max(1)[:, None] - position_GB.min(1) < window
    tables = (*_block_table(seen_GG & ~whole_GG), *_block_table(whole_GG))
    until_T, at_T, part_counts, parts, whole_counts, wholes = (
        moved(torch.from_numpy(each), device) for each in (seen_until_T, position_T, *tables)
    )

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen: Tensor = (key <= query) & (query < until_T[key])
        return seen if window is None else seen & (at_T[query] - at_T[key] < window)

    size = (len(seen_until_T), len(seen_until_T))
    mask: BlockMask = BlockMask.from_kv_blocks(
        part_counts, parts, whole_counts, wholes, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=size
    )
    return mask


def _positions(tree: PrefixTree) -> NDArray[np.int64]:
    """Positions whose differences are those within sequences; a root's are packed ones, so that no trees overlap."""
    firsts: list[int] = []
    for start, parent in zip(tree.starts, tree.parents, strict=True):
        firsts.append(start if parent == ROOT else firsts[parent] + tree.lengths[parent])
    positions: NDArray[np.int64] = np.concatenate(
        [np.arange(first, first + length) for first, length in zip(firsts, tree.lengths, strict=True)]
    )
    return positions


def _block_table(chosen_GG: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Number of chosen blocks of keys for each block of queries, [1, 1, G], and their indices first, [1, 1, G, G]."""
    order_GG = np.argsort(~chosen_GG, axis=1, kind="stable").astype(np.int32)
    return chosen_GG.sum(1, dtype=np.int32)[None, None], order_GG[None, None]


@lru_cache(maxsize=4)
def sequence_ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """0 and the end of each sequence, int32, shape [N + 1]."""
    return moved(torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32), device)
