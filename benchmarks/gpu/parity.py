"""Models (beside float32 on the CPU), head and packed attention (beside float64): relative errors, and of gradients."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu.results import CUDA, DEVICE, DTYPE, attempt
from slipstream.learner.data.packing import all_actions, pack
from slipstream.learner.models import attention, fused_head
from slipstream.learner.models.attention import Window, packed_attention, segments_attention
from slipstream.learner.models.fused_head import LogitRule, score_states
from slipstream.learner.models.scoring import score_share

FILE = "parity.json"
RULES = {"plain": LogitRule(), "cap": LogitRule(cap=3.0, temperature=0.7)}
KERNELS = ("segments", "varlen", "flex") if CUDA else ("segments",)
LIMITS: dict[str, dict[str, Any]] = {
    "": {}, " window 50": {"window": 50}, " window 50, cap": {"window": 50, "softcap": 2.0},
    " window 50, sinks": {"window": 50, "sinks": True},
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 5003, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any]] = {
    "Qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
    "Gemma 2": (Gemma2ForCausalLM, Gemma2Config(**SIZES, query_pre_attn_scalar=64, sliding_window=50)),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig(**SIZES, num_local_experts=4, sliding_window=50)),
}
LENGTHS = (200, 130, 130, 61, 7)


def parity() -> None:
    """Of models under the kernels that are chosen for them, of the head, and of each kernel of attention."""
    for dtype in (torch.float32, torch.bfloat16):
        for name in MODELS:
            attempt(FILE, f"{name} {dtype}", lambda name=name, dtype=dtype: of_model(name, dtype))  # type: ignore[misc]
        for name, rule in RULES.items():
            attempt(FILE, f"head {dtype} {name}", lambda dtype=dtype, rule=rule: of_head(dtype, rule))  # type: ignore[misc]
    for kernel in KERNELS:
        for name, limits in LIMITS.items():
            attempt(FILE, f"{kernel} {DTYPE}{name}", lambda one=kernel, of=limits: of_attention(one, DTYPE, **of))  # type: ignore[misc]


def of_model(name: str, dtype: torch.dtype) -> dict[str, float]:
    """Errors of the loss, and of the gradients of all weights together and of the worst one."""
    attention.register()
    (batch,) = pack(
        [all_actions(np.random.default_rng(0).integers(5000, size=n + 1)) for n in LENGTHS], token_budget=600
    )
    losses, gradients = [], []
    model_class, config = MODELS[name]
    for kernel, device in (("segments", torch.device("cpu")), ("auto", DEVICE)):
        torch.manual_seed(0)
        model: nn.Module = model_class._from_config(config, attn_implementation=kernel).eval()
        model = model.to(dtype).to(device, torch.float32 if kernel == "segments" else dtype)
        loss = -score_share(model, batch.to(device), LogitRule.of(model)).logprobs_A.mean()
        torch.autograd.backward(loss)
        losses.append(loss.detach())
        gradients.append({key: each.grad for key, each in model.named_parameters() if each.grad is not None})
    expected, found = gradients
    both = [torch.cat([each.double().cpu().flatten() for each in of.values()]) for of in gradients]
    worst = max(expected, key=lambda key: _error(found[key], expected[key]))
    return {
        "loss": _error(losses[1], losses[0]), "gradients": _error(both[1], both[0]),
        f"worst: {worst}": _error(found[worst], expected[worst]),
    }  # fmt: skip


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


def of_attention(
    kernel: str, dtype: torch.dtype, window: int | None = None, softcap: float | None = None, *, sinks: bool = False
) -> dict[str, float]:
    """Errors of the output, and of the gradients of query, key and value, and of sinks."""
    torch.manual_seed(2)
    base = [torch.randn(1, heads, sum(LENGTHS), 64) for heads in (8, 2, 2)]
    exact, own = _copies([*base, torch.linspace(-1, 2, 8)] if sinks else base, dtype)
    mask = None if window is None else Window(window, chunked=False)

    def attend(states: list[Tensor], **given: Any) -> Tensor:
        query, key, value, *sink = states
        call: Any = packed_attention if given else segments_attention
        given |= {"segment_lengths": LENGTHS, "softcap": softcap, "s_aux": sink[0] if sink else None}
        out: Tensor = call(nn.Identity(), query, key, value, mask, **given)[0]
        torch.autograd.backward(out.double().square().sum())
        return out

    expected = attend(exact)  # the learner's own, which its tests compare with attention from all scores
    found = attend(own, requested=kernel)
    names = ("query", "key", "value", "sinks")
    gradients = {name: _error(each.grad, right.grad) for name, each, right in zip(names, own, exact, strict=False)}
    return {"out": _error(found, expected), **gradients}


def _copies(base: list[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The numbers of a dtype, in float64 on the CPU and on the device."""
    exact = [each.to(dtype).double().requires_grad_() for each in base]
    return exact, [each.to(DEVICE, dtype).requires_grad_() for each in base]


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None, "backward has run"
    return float((found.detach().double().cpu() - expected.detach()).norm() / expected.detach().norm())
