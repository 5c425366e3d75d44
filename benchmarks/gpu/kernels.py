"""Time and memory of the head and of packed attention, by size of the tile and by kernel.

# A actions, D hidden size, V vocabulary
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from benchmarks.gpu.results import CUDA, DEVICE, DTYPE, TINY, attempt, median_s, save, synchronise
from benchmarks.head import Head, all_logits
from slipstream.learner.models import attention_kernels, fused_head
from slipstream.learner.models.attention import packed_attention
from slipstream.learner.models.attention_kernels import sequence_ends
from slipstream.learner.models.fused_head import LogitRule, score_states

FILE = "kernels.json"
VOCABULARY, SIZES = (1024, [(64, 32)]) if TINY else (151_936, [(8192, 1024), (8192, 2048)])
"""Of the head: actions and hidden size."""
TOKENS, HEADS, KV_HEADS, HEAD_DIM = (256, 4, 2, 32) if TINY else (8192, 16, 8, 128)
TILES = range(22, 27)
"""Logarithms of the numbers of logits in a tile."""

Attend = Callable[[Tensor, Tensor, Tensor], Any]


def head() -> None:
    """The fused head beside all logits."""
    tile = fused_head.TILE[DEVICE.type]
    for actions, hidden in SIZES:
        name = f"head {actions} x {hidden} x {VOCABULARY}"

        def measure(title: str, step: Head, name: str = name, actions: int = actions, hidden: int = hidden) -> None:
            attempt(FILE, f"{name}, {title}", lambda: _both_passes(step, actions, hidden))

        measure("all logits", all_logits)
        if not TINY:
            measure("compiled all logits", torch.compile(all_logits))
        measure("fused", _fused())
        measure("kept", _fused(kept_bytes=1 << 33))
        measure("with entropy", _fused(entropy="value"))
        for power in TILES:
            fused_head.TILE[DEVICE.type] = 1 << power
            measure(f"tile 2**{power}", _fused())
            with torch.compiler.set_stance("force_eager"):
                measure(f"tile 2**{power}, not compiled", _fused())
        fused_head.TILE[DEVICE.type] = tile


def _fused(**options: Any) -> Head:
    def head(states_AD: Tensor, weight_VD: Tensor, actions_A: Tensor) -> Tensor:
        return score_states(states_AD, weight_VD, None, actions_A, LogitRule(), **options).logprobs_A

    return head


def _both_passes(step: Head, actions: int, hidden: int) -> dict[str, float | None]:
    torch.manual_seed(0)
    states_AD = torch.randn(actions, hidden, device=DEVICE, dtype=DTYPE, requires_grad=True)
    weight_VD = (torch.randn(VOCABULARY, hidden, device=DEVICE) / hidden**0.5).to(DTYPE).requires_grad_()
    actions_A = torch.randint(VOCABULARY, (actions,), device=DEVICE)

    def both() -> None:
        states_AD.grad = weight_VD.grad = None
        torch.autograd.backward(step(states_AD, weight_VD, actions_A).mean())

    before = 0
    if CUDA:
        both()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated() - states_AD.nbytes - weight_VD.nbytes  # gradients
        torch.cuda.reset_peak_memory_stats()
    seconds = median_s(both, 5, 1)
    flops = 6 * actions * hidden * VOCABULARY
    peak_mb = (torch.cuda.max_memory_allocated() - before) / 1e6 if CUDA else None
    return {"ms": 1e3 * seconds, "peak_mb": peak_mb, "matrix_tflops": flops / seconds / 1e12}


def attention() -> None:
    """Packs of equal and of mixed lengths: the learner's kernels, and SDPA with each of torch's."""
    packs = {
        "mixed": _mixed(0),
        "one sequence": [TOKENS],
        "one of four times": [4 * TOKENS],
        "16 equal": [TOKENS // 16] * 16,
    }
    save(FILE, "attention, mixed lengths", packs["mixed"])
    if CUDA:
        for dtype in (DTYPE, torch.float32):
            query, key, value = (each.to(dtype) for each in _inputs())
            chosen = torch._fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=True)
            save(FILE, f"attention, kernel for {dtype} (1 flash, 2 efficient, 3 cudnn, 0 math)", chosen)
    kernels = ("varlen", "flex", "segments") if CUDA else ("segments",)
    for name, lengths in packs.items():
        for kernel in kernels:
            _attend(f"attention, {name}: {kernel}", _packed(lengths, kernel), lengths)
        if CUDA:
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                _attend(f"attention, {name}: segments, {backend.name}", _packed(lengths, "segments"), lengths, backend)
    if CUDA:
        _attend("attention, mixed: varlen, fewer key heads", _varlen_of_groups(packs["mixed"]), packs["mixed"])
    for kernel in kernels:
        attempt(FILE, f"attention, new lengths each time: {kernel}", lambda one=kernel: _new_lengths(one))  # type: ignore[misc]


def _mixed(seed: int) -> list[int]:
    rng, lengths = np.random.default_rng(seed), list[int]()
    while sum(lengths) < TOKENS:
        length = int(rng.integers(max(2, TOKENS // 128), TOKENS // 8))
        lengths.append(min(length, TOKENS - sum(lengths)))
    return sorted(lengths, reverse=True)


def _inputs(tokens: int = TOKENS) -> list[Tensor]:
    return [
        torch.randn(1, heads, tokens, HEAD_DIM, device=DEVICE, dtype=DTYPE, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def _attend(name: str, attend: Attend, lengths: Sequence[int], backend: SDPBackend | None = None) -> None:
    """Saves the time of both passes, and the speed of the products that they need."""

    def measure() -> dict[str, float]:
        query, key, value = _inputs(sum(lengths))

        def both() -> None:
            query.grad = key.grad = value.grad = None
            attend(query, key, value).sum().backward()

        with nullcontext() if backend is None else sdpa_kernel([backend]):
            seconds = median_s(both)
        # Two products forward, five backward, of half of the pairs.
        flops = 7 * HEADS * HEAD_DIM * sum(length**2 for length in lengths)
        return {"ms": 1e3 * seconds, "tflops": flops / seconds / 1e12}

    attempt(FILE, name, measure)


def _packed(lengths: Sequence[int], kernel: str) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        given: Any = {"segment_lengths": tuple(lengths), "requested": kernel}
        return packed_attention(torch.nn.Identity(), query, key, value, None, **given)[0]

    return attend


def _new_lengths(kernel: str) -> dict[str, list[float]]:
    """Packs whose lengths were never seen, as in training."""
    inputs, times = _inputs(), []
    for number in range(6):
        attend = _packed(_mixed(100 + number), kernel)
        synchronise()
        began = time.perf_counter()
        attend(*inputs).sum().backward()
        synchronise()
        times.append(1e3 * (time.perf_counter() - began))
    return {"ms": times}


def _varlen_of_groups(lengths: Sequence[int]) -> Attend:
    """torch's varlen attention with the keys as they are, which torch 2.11 documents only for as many heads."""
    ends = sequence_ends(tuple(lengths), DEVICE)
    options: dict[str, Any] = {"enable_gqa": True} if attention_kernels._TAKES_GROUPS else {}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
        return varlen_attn(query, key, value, ends, ends, max(lengths), max(lengths), window_size=(-1, 0), **options)

    return attend
