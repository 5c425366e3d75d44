"""Head and packed attention on the device, beside float64 on the CPU: relative errors of values and gradients."""

import torch
from torch import Tensor

from benchmarks.gpu.results import DEVICE, attempt
from slipstream.learner.models import fused_head
from slipstream.learner.models.attention import Window, segments_attention
from slipstream.learner.models.fused_head import LogitRule, score_states

FILE = "parity.json"
RULES = {"plain": LogitRule(), "cap": LogitRule(cap=3.0, temperature=0.7)}


def parity() -> None:
    """Of both, in two dtypes."""
    for dtype in (torch.float32, torch.bfloat16):
        for name, rule in RULES.items():
            attempt(FILE, f"head {dtype} {name}", lambda dtype=dtype, rule=rule: of_head(dtype, rule))  # type: ignore[misc]
        for window in (None, 50):
            name = f"attention {dtype}" + (f" window {window}" if window else "")
            attempt(FILE, name, lambda dtype=dtype, window=window: of_attention(dtype, window))  # type: ignore[misc]


def of_head(dtype: torch.dtype, rule: LogitRule) -> dict[str, float]:
    """Errors of log-probs and entropy, and of the gradients of hidden states and head."""
    torch.manual_seed(1)
    base = [torch.randn(301, 64), torch.randn(5003, 64) / 4]
    actions = torch.randint(100, 5000, (301,))
    exact, own = _copies(base, dtype)
    logits = exact[0] @ exact[1].T * rule.factor
    if rule.cap is not None:
        logits = rule.cap * (logits / rule.cap).tanh()
    logprobs = (logits / rule.temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    expected = logprobs.gather(1, actions[:, None])[:, 0]
    torch.autograd.backward(expected.sum() + entropy.sum())
    fused_head.TILE[DEVICE.type] = 301 * 700
    found = score_states(own[0], own[1], None, actions.to(DEVICE), rule, entropy="gradient")
    assert found.entropy_A is not None, "it was requested"
    torch.autograd.backward(found.logprobs_A.sum() + found.entropy_A.sum())
    return {
        "logprobs": _error(found.logprobs_A, expected), "entropy": _error(found.entropy_A, entropy),
        "states": _error(own[0].grad, exact[0].grad), "weight": _error(own[1].grad, exact[1].grad),
    }  # fmt: skip


def of_attention(dtype: torch.dtype, window: int | None) -> dict[str, float]:
    """Errors of the output, and of the gradients of query, key and value."""
    torch.manual_seed(2)
    lengths = (200, 130, 130, 61, 7)
    exact, own = _copies([torch.randn(1, heads, sum(lengths), 64) for heads in (8, 2, 2)], dtype)
    parts, start = [], 0
    for length in lengths:
        q, k, v = (each[:, :, start : start + length] for each in exact)
        k, v = (each.repeat_interleave(4, 1) for each in (k, v))
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        if window is not None:
            visible = visible.triu(1 - window)
        scores = (q @ k.transpose(2, 3) / 8).masked_fill(~visible, float("-inf"))
        parts.append((scores.softmax(-1) @ v).transpose(1, 2))
        start += length
    expected = torch.cat(parts, 1)
    torch.autograd.backward(expected.square().sum())
    mask = None if window is None else Window(window, chunked=False)
    found = segments_attention(torch.nn.Module(), own[0], own[1], own[2], mask, segment_lengths=lengths)[0]
    torch.autograd.backward(found.float().square().sum())
    gradients = {name: _error(each.grad, right.grad) for name, each, right in zip("qkv", own, exact, strict=True)}
    return {"out": _error(found, expected), **gradients}


def _copies(base: list[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The numbers of a dtype, in float64 on the CPU and on the device."""
    exact = [each.to(dtype).double().requires_grad_() for each in base]
    return exact, [each.to(DEVICE, dtype).requires_grad_() for each in base]


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None, "backward has run"
    return float((found.detach().double().cpu() - expected.detach()).norm() / expected.detach().norm())
