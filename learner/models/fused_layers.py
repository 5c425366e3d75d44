"""RMS norms and rotary embeddings of transformers models in few passes over memory, forward and backward.

Operation by operation, they take a third of a layer's time on a CPU.

# D features of a norm, H heads, T tokens
"""

import inspect
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

TOLERANCE = 1e-5
"""Largest difference from a model's own results, which are of the order of 1: rounding."""
_ROTARY = "apply_rotary_pos_emb"


def fuse_layers(model: nn.Module) -> None:
    """Exchanges a model's norms and rotary embeddings for those of this module where they compute the same.

    Args:
        model: of transformers; computes in fp32 on a CPU. Its parameters may be without data.
    """
    formulas: dict[tuple[type[nn.Module], float], bool] = {}
    for norm in model.modules():
        epsilon = getattr(norm, "variance_epsilon", None)
        if not isinstance(epsilon, float) or [name for name, _ in norm.named_parameters()] != ["weight"]:
            continue
        key = (type(norm), epsilon)
        if key not in formulas:
            formulas[key] = _is_rms_norm(norm, epsilon)
        if formulas[key]:
            norm.forward = MethodType(_norm, norm)
    for name in {type(part).__module__ for part in model.modules()}:
        source = sys.modules[name]
        if (rotate := getattr(source, _ROTARY, None)) is not None and _is_rotary(rotate):
            setattr(source, _ROTARY, rotary)


def rms_norm(states: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """states / sqrt(mean(states²) + ε) · weight, over the last dimension.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4.
    """
    normed: Tensor = _RmsNorm.apply(states, weight_D, epsilon)  # type: ignore[no-untyped-call]
    return normed


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:  # transformers passes them by these names
    """Queries and keys turned by their positions' angles, in pairs of one feature of each half.

    Source: Su et al. 2021, arXiv 2104.09864, eq. 34, with the halves of transformers.

    Args:
        q, k: [B, H, T, D] with `unsqueeze_dim` 1.
        cos, sin: [B, T, D], without gradient; halves differ where positions of images have several axes. With fewer
            features the last ones are not turned.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned_q: Tensor = _Rotary.apply(q, cos, sin)  # type: ignore[no-untyped-call]
    turned_k: Tensor = _Rotary.apply(k, cos, sin)  # type: ignore[no-untyped-call]
    return turned_q, turned_k


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        size = states.shape[-1]
        norms = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        scale = norms.square_().div_(size).add_(epsilon).rsqrt_()
        ctx.save_for_backward(states, weight_D, scale)
        normed: Tensor = states * scale
        return normed.mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        states, weight_D, scale = ctx.saved_tensors
        (grad,) = gradients
        normed = states * scale
        product = grad * normed
        of_weight_D = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        projection = (product @ weight_D).div_(-states.shape[-1])[..., None]
        of_states = torch.mul(grad, weight_D, out=product).addcmul_(normed, projection).mul_(scale)
        return of_states, of_weight_D, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = sin.chunk(2, -1)
        return _turned(states, cos, (first, second), 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        first, second = sin.chunk(2, -1)
        return _turned(gradients[0], cos, (second, first), -1.0), None, None


def _turned(states: Tensor, cos: Tensor, sines: tuple[Tensor, Tensor], sign: float) -> Tensor:
    """The product with cosines, and that of each half with the sines for the other one."""
    size = cos.shape[-1]
    if size < states.shape[-1]:
        return torch.cat([_turned(states[..., :size], cos, sines, sign), states[..., size:]], dim=-1)
    turned = states * cos
    first, second = states.chunk(2, -1)
    of_first, of_second = turned.chunk(2, -1)
    of_first.addcmul_(second, sines[0], value=-sign)
    of_second.addcmul_(first, sines[1], value=sign)
    return turned


def _norm(norm: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, norm.weight, norm.variance_epsilon)


def _is_rms_norm(norm: nn.Module, epsilon: float) -> bool:
    """True if a module computes `rms_norm` with its weight, from nothing but the states."""
    (weight_D,) = norm.parameters()
    if weight_D.dim() > 1 or len(inspect.signature(norm.forward).parameters) > 1:
        return False
    generator = torch.Generator().manual_seed(0)
    own_D = 1 + torch.rand(weight_D.shape, generator=generator)
    states = 1e-2 * torch.randn(3, *weight_D.shape, generator=generator)  # small, so that ε has its part
    return _same(lambda: functional_call(norm, {"weight": own_D}, (states,)), lambda: rms_norm(states, own_D, epsilon))


def _is_rotary(rotate: Callable[..., Any]) -> bool:
    """True if a function of transformers computes `rotary`."""
    if list(inspect.signature(rotate).parameters) != list(inspect.signature(rotary).parameters):
        return False
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (2, 1))
    angle = torch.rand(1, 3, 8, generator=generator)
    given = (query, key, angle.cos(), angle.sin())
    return _same(lambda: torch.cat(rotate(*given), dim=1), lambda: torch.cat(rotary(*given), dim=1))


def _same(theirs: Callable[[], Tensor], own: Callable[[], Tensor]) -> bool:
    with torch.no_grad():
        found = own()
        try:
            expected = theirs()
        except RuntimeError:  # of torch: another formula, for other shapes
            return False
    return expected.shape == found.shape and bool((expected - found).abs().max() <= TOLERANCE)
