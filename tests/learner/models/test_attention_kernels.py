"""Kernels of attention on GPUs: the choice among them, and what they are called with. No GPU runs here."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.data.prefix_tree import ROOT, PrefixTree
from slipstream.learner.models import attention, attention_kernels
from slipstream.learner.models.attention import Window, packed_attention, segments_attention
from slipstream.learner.models.attention_kernels import BLOCK, Call, Machine, block_mask, choose, flex
from slipstream.learner.models.layers import _selective_contexts
from tests.learner.models.test_attention import LENGTHS, masked_attention, random_states, visible_pairs

H100 = Machine("cuda", (9, 0), triton=True)
BF16 = torch.bfloat16
QWEN = Call(BF16, 128)
LONG = [[300, 200, 77], [500, 10, 10, 400], [128, 256, 384], [1000], [7, 6]]


@pytest.mark.parametrize(
    ("call", "machine", "kernel", "lack"),
    [
        (QWEN, H100, "varlen", ""),
        (Call(torch.float16, 256), Machine("cuda", (8, 0)), "varlen", ""),
        (Call(BF16, 192), Machine("cuda", (8, 9)), "varlen", ""),
        (Call(BF16, 256, softcap=True), H100, "flex", "soft cap"),
        (Call(BF16, 64, sinks=True), H100, "flex", "sinks"),
        (Call(BF16, 80 + 4), H100, "flex", "84"),
        (Call(BF16, 256, softcap=True), Machine("cuda", (9, 0)), "segments", "triton"),
        (Call(torch.float32, 128), H100, "segments", "float32"),
        (Call(BF16, 128, dropout=True), H100, "segments", "dropout"),
        (Call(BF16, 512), H100, "segments", "512"),
        (Call(BF16, 256), Machine("cuda", (8, 9), triton=True), "segments", "256"),
        (QWEN, Machine("cuda", (7, 5), triton=True), "segments", "7.5"),
        (QWEN, Machine("rocm", (9, 4), triton=True), "segments", "rocm"),
        (QWEN, Machine("cpu"), "segments", "cpu"),
        (Call(BF16, 128, tree=True), H100, "flex", "trees"),
        (Call(BF16, 128, tree=True), Machine("cuda", (9, 0)), "segments", "triton"),
    ],
    ids=str,
)
def test_kernel_is_chosen_by_device_and_model(call: Call, machine: Machine, kernel: str, lack: str) -> None:
    choice = choose("auto", call, machine)
    assert choice.backend == kernel
    assert lack in choice.reason


@pytest.mark.parametrize(
    ("requested", "call", "machine"),
    [
        ("varlen", QWEN, Machine.of(torch.device("cpu"))),
        ("flex", Call(torch.float32, 128), H100),
        ("varlen", Call(BF16, 128, sinks=True), H100),
    ],
)
def test_requested_kernel_is_used_or_refused(requested: str, call: Call, machine: Machine) -> None:
    assert choose(requested, QWEN, H100).backend == requested
    assert choose("segments", call, machine).backend == "segments"
    with pytest.raises(ConfigError, match=rf"learner\.attention={requested}: .*learner\.attention=auto"):
        choose(requested, call, machine)


TREES = [
    *map(PrefixTree.of_sequences, LONG),
    PrefixTree((300, 100, 60, 200, 50, 150, 30), (-1, 0, 1, 1, 0, -1, 5)),
    PrefixTree((200, 10, 10, 10, 130, 20, 128, 128, 1), (-1, 0, 0, 0, -1, 4, 5, 5, 4)),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree.lengths))
@pytest.mark.parametrize("window", [None, 1, 100, 128, 300])
def test_block_mask_has_the_visible_pairs(tree: PrefixTree, window: int | None) -> None:
    mask = block_mask(tree, window, torch.device("cpu"))
    tokens = sum(tree.lengths)
    pairs = visible_pairs(tree.padded(max(2 * BLOCK - tokens, -tokens % BLOCK)), window)
    blocks = pairs.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    needed, computed, whole = blocks.any(3).any(1), mask.to_dense()[0, 0].bool(), blocks.all(3).all(1)
    assert (computed | ~needed).all()
    tables = (mask.full_kv_num_blocks, mask.full_kv_indices)
    assert tables[0] is not None and tables[1] is not None
    unmasked = torch.zeros_like(whole)
    for row, count, indices in zip(unmasked, tables[0][0, 0].tolist(), tables[1][0, 0].tolist(), strict=True):
        row[indices[:count]] = True
    assert (whole | ~unmasked).all()
    if window is None or set(tree.parents) == {ROOT}:  # else a few blocks are computed that need not be
        assert torch.equal(computed, needed)
        assert torch.equal(unmasked, whole)
    index = torch.arange(len(pairs))
    found = mask.mask_mod(torch.tensor(0), torch.tensor(0), index[:, None], index[None])
    assert torch.equal(found, pairs)


@pytest.mark.soak
@torch.no_grad()
@pytest.mark.parametrize("softcap", [None, 0.8], ids=["plain", "capped"])
def test_compiled_flex_attention_equals_masked_attention(softcap: float | None) -> None:
    attended = torch.compiler.disable(flex)  # as transformers calls it
    caching, _ = create_selective_checkpoint_contexts([])
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for tree, window in zip(TREES, [None, None, 100, 300, 3, None, 100], strict=True):
        query, key, value = (each.float() for each in random_states(tree.lengths, heads=4, key_heads=2))
        with caching:
            found = attended(query, key, value, tree, window=window, scaling=0.3, softcap=softcap)
        torch.testing.assert_close(found, masked_attention(query, key, value, tree, 0.3, window, softcap))
    assert graphs["unique_graphs"] - before <= 1, "compiled again for other lengths"


def test_flex_attention_that_is_not_compiled_is_refused() -> None:
    query, key, value = (each.detach() for each in random_states([5], heads=2, key_heads=1))
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match=r"learner\.attention=segments"):
        flex(query, key, value, PrefixTree.of_sequences([5]), window=None, scaling=1.0)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 50], ids=["whole", "window"])
@pytest.mark.parametrize("softcap", [None, 0.8], ids=["plain", "capped"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_flex_attention_equals_masked_attention(
    window: int | None, softcap: float | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not compiled: so it takes a second, and returns the sums that sinks need on a CPU too."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(attention_kernels, "_compiled_flex", lambda: attention_kernels._flex)
    tree = PrefixTree((130, 40, 10, 60, 7), (-1, 0, 1, 1, -1))
    states = random_states(tree.lengths, heads=4, key_heads=2)
    sink = torch.linspace(-1, 2, 4, dtype=torch.float64) if sinks else None
    found = flex(*states, tree, window=window, scaling=0.3, softcap=softcap, sinks_H=sink)
    expected = masked_attention(*states, tree, 0.3, window, softcap, sink)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def reference_varlen(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, _: Tensor, longest: int, __: int, **given: Any
) -> Tensor:
    """`varlen_attn` by its documentation: a window counts the tokens before the query's own."""
    lengths = ends.diff().tolist()
    assert longest == max(lengths) and given["window_size"][1] == 0
    assert query.shape[-1] == value.shape[-1], "the kernel takes values of the keys' size"
    assert given.get("enable_gqa") or query.shape[1] == key.shape[1]
    before = given["window_size"][0]
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    return masked_attention(query, key, value, lengths, given["scale"], None if before < 0 else before + 1)[0]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", [None, Window(3, chunked=False), Window(3, chunked=True)], ids=str)
@pytest.mark.parametrize("takes_groups", [False, True])
def test_varlen_attention_equals_that_by_segments(
    lengths: list[int], mask: Window | None, takes_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "varlen_attn", reference_varlen)
    monkeypatch.setattr(attention_kernels, "_TAKES_GROUPS", takes_groups)
    monkeypatch.setattr(attention, "choose", lambda *_: attention_kernels.Choice("varlen", ""))
    attention._chosen.cache_clear()
    monkeypatch.setattr(attention, "_chosen", attention._chosen.__wrapped__)
    query, key, value = random_states(lengths, heads=4, key_heads=2)
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    given: dict[str, Any] = {"segment_lengths": lengths, "scaling": 0.3}
    module = torch.nn.Identity()
    found, _ = packed_attention(module, query, key, value[..., :6], mask, cu_seq_lens_q=ends, **given)
    expected, _ = segments_attention(module, query, key, value[..., :6], mask, **given)
    torch.testing.assert_close(found, expected)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    torch.testing.assert_close(
        *(torch.autograd.grad((out * direction).sum(), (query, key, value)) for out in (found, expected))
    )


def test_selective_checkpointing_keeps_results_of_the_kernel() -> None:
    kept, _ = _selective_contexts(frozenset())
    with FakeTensorMode():
        query, key, value = (torch.empty(32, 4, 64, dtype=BF16, requires_grad=True) for _ in range(3))
        ends = torch.zeros(3, dtype=torch.int32)
        with kept:
            out = varlen_attn(query, key, value, ends, ends, 16, 16, window_size=(-1, 0))
        assert isinstance(out, Tensor) and out.shape == (32, 4, 64)
        out.sum().backward()
        assert [each.grad.shape for each in (query, key, value) if each.grad is not None] == 3 * [(32, 4, 64)]
    assert list(kept.storage) == [torch.ops.torch_attn._varlen_attn.default]
