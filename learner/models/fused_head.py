"""Log-probs of actions straight from hidden states and language head: the logits never exist as a whole.

The vocabulary is cut into tiles. The forward pass goes over them with a running maximum and sum; the backward pass has
each tile's logits again, kept or computed anew, and turns them into their gradient in place. On GPUs both are compiled:
operation by operation, they would read and write each tile many times.

# A actions, V vocabulary, W columns of a tile, D hidden size
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from slipstream.learner.models.vision import unsampled_tokens

Entropy = Literal["none", "value", "gradient"]

IMPOSSIBLE = -1e30
"""Logit of a token that is never sampled; not -inf, of which 0 times it, in the entropy, would not be 0."""
TILE = {"cpu": 2**22, "cuda": 2**24}
"""Logits of a tile: fewer, and matrix products lose speed; more, and memory grows by three times as many in fp32.

In bfloat16 those of a GPU are 34 MB: an A100 (40 MB) or H100 (50 MB) reads them from its L2 cache.
"""
FEWEST_COLUMNS = 256
"""Of a tile: with fewer, reading the hidden states for each takes longer than the products."""


@dataclass(frozen=True)
class LogitRule:
    """Logits from products of hidden state and head: cap * tanh(factor * product / cap) / temperature."""

    factor: float = 1.0
    cap: float | None = None
    temperature: float = 1.0
    impossible: tuple[int, ...] = ()
    """Tokens that get the logit `IMPOSSIBLE`."""

    @classmethod
    def of(cls, model: nn.Module, *, temperature: float = 1.0, whole_vocabulary: bool = False) -> Self:
        """The rule of a transformers model, by the names that its families give the settings."""
        config: Any = getattr(model, "config", None)
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        factor = float(getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None) or 1.0)
        return cls(
            factor=factor / float(getattr(text, "logits_scaling", None) or 1.0),
            cap=getattr(text, "final_logit_softcapping", None),
            temperature=temperature,
            impossible=() if whole_vocabulary else unsampled_tokens(model),
        )

    @property
    def scale(self) -> float:
        """Derivative of a logit by its product, where there is no cap."""
        return self.factor / self.temperature

    def logits(self, product_AW: Tensor, impossible_W: Tensor | None = None) -> Tensor:
        """Logits, fp32; the product itself where nothing is to be done."""
        logits_AW = product_AW.float()
        if self.cap is not None:
            logits_AW = (logits_AW * (self.factor / self.cap)).tanh_().mul_(self.cap / self.temperature)
        elif self.scale != 1:
            logits_AW = logits_AW * self.scale
        return logits_AW if impossible_W is None else logits_AW.masked_fill(impossible_W, IMPOSSIBLE)

    def derivative(self, logits_AW: Tensor) -> Tensor | None:
        """Derivative of the logits by the products, over `scale`; None: 1 everywhere."""
        if self.cap is None:
            return None
        return (logits_AW * (self.temperature / self.cap)).square_().neg_().add_(1)

    def impossible_columns(self, tile: "_Tile", device: torch.device) -> Tensor | None:
        """True at the columns of tokens that get `IMPOSSIBLE`, shape [W]; None if the tile has none."""
        columns = [token - tile.first for token in self.impossible if tile.first <= token < tile.last]
        if not columns:
            return None
        impossible_W = torch.zeros(tile.last - tile.first, dtype=torch.bool, device=device)
        for column in columns:  # not by a tensor of them, which would be copied to the device
            impossible_W[column] = True
        return impossible_W


class ActionScores(NamedTuple):
    """Scores of actions under a model, fp32, shape [A]."""

    logprobs_A: Tensor
    entropy_A: Tensor | None
    """Entropy of the distribution that each action was drawn from; None if not requested."""
    collision_A: Tensor | None
    """Sum of that distribution's squared probabilities, without gradient; None if not requested."""
    further_RA: Tensor | None = None
    """Further values, by a caller's own readout of the hidden states."""


def score_states(
    states_AD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    actions_A: Tensor,
    rule: LogitRule,
    *,
    entropy: Entropy = "none",
    collision: bool = False,
    kept_bytes: int = 0,
) -> ActionScores:
    """log π of actions from the hidden states before them, differentiable once by states, weight and bias.

    Source of the running maximum and sum: Milakov and Gimelshein 2018, arXiv 1805.02867.

    Args:
        states_AD, weight_VD, bias_V: all of one dtype.
        kept_bytes: most memory for logits that are kept for the backward pass; it computes others a second time.
    """
    wanted = _Wanted(rule, entropy, collision, kept_bytes)
    logprobs_A, entropy_A, collision_A = _FusedHead.apply(  # type: ignore[no-untyped-call]
        states_AD, weight_VD, bias_V, actions_A, wanted
    )
    return ActionScores(logprobs_A, None if entropy == "none" else entropy_A, collision_A if collision else None)


class _Wanted(NamedTuple):
    rule: LogitRule
    entropy: Entropy
    collision: bool
    kept_bytes: int


class _Tile(NamedTuple):
    """Columns of the vocabulary."""

    first: int
    last: int


def _tiles(rows: int, vocabulary: int, device: torch.device) -> Iterator[_Tile]:
    logits = TILE.get(device.type, TILE["cuda"])
    width = min(vocabulary, max(FEWEST_COLUMNS, logits // max(1, rows)))
    for first in range(0, vocabulary, width):
        yield _Tile(first, min(first + width, vocabulary))


class _FusedHead(torch.autograd.Function):
    """See `score_states`."""

    @staticmethod
    def forward(
        ctx: Any, states_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, actions_A: Tensor, wanted: _Wanted
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropy and collision, fp32, shape [A]; the last two are 0 if not wanted."""
        rows, vocabulary = len(states_AD), len(weight_VD)
        size = rows * vocabulary * states_AD.element_size()
        keeps = any(ctx.needs_input_grad) and size <= wanted.kept_bytes
        kept: list[Tensor] = []
        sums, add = _Sums.empty(states_AD), _operations(states_AD.device.type).add
        for tile in _tiles(rows, vocabulary, states_AD.device):
            product_AW = _product(states_AD, weight_VD, bias_V, tile)
            if keeps:
                kept.append(product_AW)
            impossible_W = wanted.rule.impossible_columns(tile, states_AD.device)
            sums = add(sums, product_AW, actions_A - tile.first, impossible_W, wanted)
        normaliser_A = sums.normaliser()
        entropy_A = normaliser_A - sums.mean_logit() if wanted.entropy != "none" else torch.zeros_like(normaliser_A)
        ctx.save_for_backward(states_AD, weight_VD, bias_V, actions_A, normaliser_A, entropy_A)
        ctx.wanted, ctx.kept = wanted, kept if keeps else None
        collision_A = sums.collision() if wanted.collision else torch.zeros_like(normaliser_A)
        ctx.mark_non_differentiable(collision_A)
        if wanted.entropy != "gradient":
            ctx.mark_non_differentiable(entropy_A)
        return sums.action_logits_A - normaliser_A, entropy_A, collision_A

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Gradients of states, weight and bias.

        That of a tile's logits is -g (p - onehot) - e p (log p + entropy), with g and e those of log-prob and entropy.
        Without e the factor -g is applied to the hidden states instead, which are fewer numbers.
        """
        states_AD, weight_VD, bias_V, actions_A, normaliser_A, entropy_A = ctx.saved_tensors
        wanted, kept = ctx.wanted, ctx.kept
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        gradient_A1, entropy_gradient_A1 = gradients[0][:, None], gradients[1][:, None]
        rule, with_entropy, dtype = wanted.rule, wanted.entropy == "gradient", states_AD.dtype
        factor_A1 = torch.full_like(gradient_A1, rule.scale) if with_entropy else -rule.scale * gradient_A1
        scaled_AD = (states_AD * factor_A1).to(dtype)
        of_states_AD = torch.zeros_like(states_AD, dtype=torch.float32) if wants_states else None
        of_weight_VD = torch.empty_like(weight_VD) if wants_weight else None
        of_bias_V = torch.empty_like(bias_V) if wants_bias else None
        differentiate = _operations(states_AD.device.type).differentiate
        for number, tile in enumerate(_tiles(len(states_AD), len(weight_VD), states_AD.device)):
            part = slice(tile.first, tile.last)
            if kept is None:
                product_AW = _product(states_AD, weight_VD, bias_V, tile)
            else:
                product_AW, kept[number] = kept[number], None
            of_logits_AW = differentiate(
                product_AW,
                actions_A - tile.first,
                rule.impossible_columns(tile, states_AD.device),
                _Outer(normaliser_A, entropy_A.detach(), gradient_A1, entropy_gradient_A1),
                wanted,
                torch.float32 if wants_bias else dtype,
            )
            of_product_AW = of_logits_AW.to(dtype)
            if of_weight_VD is not None:
                torch.mm(of_product_AW.T, scaled_AD, out=of_weight_VD[part])
            if of_bias_V is not None:
                of_bias_V[part] = (of_logits_AW * factor_A1).sum(0)
            if of_states_AD is not None:
                _add_product(of_states_AD, of_product_AW, weight_VD[part])
        if of_states_AD is not None:
            of_states_AD = of_states_AD.mul_(factor_A1).to(dtype)
        return of_states_AD, of_weight_VD, of_bias_V, None, None


class _Sums(NamedTuple):
    """Sums over the tiles so far, relative to the largest logit so far, shape [A]."""

    largest_A: Tensor
    exponentials_A: Tensor
    logits_A: Tensor
    squares_A: Tensor
    action_logits_A: Tensor

    @classmethod
    def empty(cls, states_AD: Tensor) -> Self:
        """Those before the first tile."""
        # Not one tensor for all of them, for which torch would compile `_add` again.
        largest_A, *zeros = (states_AD.new_zeros(len(states_AD), dtype=torch.float32) for _ in cls._fields)
        return cls(largest_A + IMPOSSIBLE, *zeros)

    def normaliser(self) -> Tensor:
        """Logarithm of the sum of the exponentials."""
        return self.largest_A + self.exponentials_A.log()

    def mean_logit(self) -> Tensor:
        """Mean logit under the distribution."""
        return self.logits_A / self.exponentials_A

    def collision(self) -> Tensor:
        """Sum of the squared probabilities."""
        return self.squares_A / self.exponentials_A.square()


def _add(sums: _Sums, product_AW: Tensor, columns_A: Tensor, impossible_W: Tensor | None, wanted: _Wanted) -> _Sums:
    """The sums with a tile added; its products stay as they are.

    Args:
        columns_A: of the actions, outside of the tile where they are in another.
    """
    logits_AW = wanted.rule.logits(product_AW, impossible_W)
    width = logits_AW.shape[1]
    inside_A = (columns_A >= 0) & (columns_A < width)
    own_A = logits_AW.gather(1, columns_A.clamp(0, width - 1)[:, None])[:, 0]
    largest_A = torch.maximum(sums.largest_A, logits_AW.amax(1))
    decay_A = (sums.largest_A - largest_A).exp_()
    exponentials_AW = (logits_AW - largest_A[:, None]).exp_()
    sum_A = sums.exponentials_A * decay_A + exponentials_AW.sum(1)
    squares_A, weighted_A = sums.squares_A, sums.logits_A
    if wanted.collision:
        squares_A = squares_A * decay_A.square() + exponentials_AW.square().sum(1)
    if wanted.entropy != "none":
        weighted_A = weighted_A * decay_A + exponentials_AW.mul_(logits_AW).sum(1)
    return _Sums(largest_A, sum_A, weighted_A, squares_A, torch.where(inside_A, own_A, sums.action_logits_A))


class _Outer(NamedTuple):
    """Values of each action for the backward pass."""

    normaliser_A: Tensor
    entropy_A: Tensor
    gradient_A1: Tensor
    entropy_gradient_A1: Tensor


def _differentiate(
    product_AW: Tensor,
    columns_A: Tensor,
    impossible_W: Tensor | None,
    outer: _Outer,
    wanted: _Wanted,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of a tile's products, over its factor, in `dtype`; the products may be overwritten."""
    logits_AW = wanted.rule.logits(product_AW, impossible_W)
    derivative_AW = wanted.rule.derivative(logits_AW)
    logprobs_AW = logits_AW.sub_(outer.normaliser_A[:, None])
    if wanted.entropy == "gradient":
        weights_AW = (logprobs_AW + outer.entropy_A[:, None]).mul_(outer.entropy_gradient_A1).add_(outer.gradient_A1)
        of_logits_AW = _add_at(logprobs_AW.exp_().mul_(weights_AW).neg_(), columns_A, outer.gradient_A1)
    else:
        of_logits_AW = _add_at(logprobs_AW.exp_(), columns_A, -torch.ones_like(outer.gradient_A1))
    if derivative_AW is not None:
        of_logits_AW.mul_(derivative_AW)
    if impossible_W is not None:
        of_logits_AW.masked_fill_(impossible_W, 0.0)
    return of_logits_AW.to(dtype)


def _add_at(values_AW: Tensor, columns_A: Tensor, added_A1: Tensor) -> Tensor:
    """Adds a number to one column of each row, if it is in the tile; in place, unless it is compiled."""
    width, columns_A1 = values_AW.shape[1], columns_A[:, None]
    if torch.compiler.is_compiling():  # to one pass over the tile, which a scatter would split
        index_W = torch.arange(width, device=values_AW.device)
        return values_AW + torch.where(index_W == columns_A1, added_A1, 0.0)
    inside_A1 = ((columns_A1 >= 0) & (columns_A1 < width)).float()
    return values_AW.scatter_add_(1, columns_A1.clamp(0, width - 1), inside_A1 * added_A1)


class _Operations(NamedTuple):
    add: Callable[[_Sums, Tensor, Tensor, Tensor | None, _Wanted], _Sums]
    differentiate: Callable[[Tensor, Tensor, Tensor | None, _Outer, _Wanted, torch.dtype], Tensor]


@cache
def _operations(device: str) -> _Operations:
    """`_add` and `_differentiate` for a type of device: compiled for GPUs, for any numbers of rows and columns."""
    if device != "cuda" or find_spec("triton") is None:
        return _Operations(_add, _differentiate)
    return compiled_operations()


def compiled_operations() -> _Operations:
    """The operations on a tile, each compiled to a few passes over it."""
    return _Operations(torch.compile(_add, dynamic=True), torch.compile(_differentiate, dynamic=True))


def _product(states_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, tile: _Tile) -> Tensor:
    weight_WD = weight_VD[tile.first : tile.last]
    if bias_V is None:
        return states_AD @ weight_WD.T
    return torch.addmm(bias_V[tile.first : tile.last], states_AD, weight_WD.T)


def _add_product(sum_AD: Tensor, left_AW: Tensor, right_WD: Tensor) -> None:
    if left_AW.dtype == torch.float32:
        sum_AD.addmm_(left_AW, right_WD)
    else:
        sum_AD.add_(left_AW @ right_WD)
