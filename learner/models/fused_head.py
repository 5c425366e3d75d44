"""Log-probs of actions straight from hidden states and language head: the logits never exist as a whole.

The vocabulary is cut into tiles. The forward pass goes over them with a running maximum and sum; the backward pass has
each tile's logits again, kept or computed anew, and turns them into their gradient in place.

# A actions, V vocabulary, W columns of a tile, D hidden size
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from slipstream.learner.models.vision import unsampled_tokens

Entropy = Literal["none", "value", "gradient"]

IMPOSSIBLE = -1e30
"""Logit of a token that is never sampled; not -inf, of which 0 times it, in the entropy, would not be 0."""
TILE = {"cpu": 2**22, "cuda": 2**25}
"""Logits of a tile: fewer, and matrix products lose speed; more, and memory grows by three times as many in fp32."""
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

    def logits(self, product_AW: Tensor, first: int) -> Tensor:
        """Logits, fp32, of the tokens from `first` on; the product itself where nothing is to be done."""
        logits_AW = product_AW.float()
        if self.cap is not None:
            logits_AW = (logits_AW * (self.factor / self.cap)).tanh_().mul_(self.cap / self.temperature)
        elif self.scale != 1:
            logits_AW = logits_AW * self.scale
        columns = self._impossible_columns(first, logits_AW)
        return logits_AW if columns is None else logits_AW.index_fill(1, columns, IMPOSSIBLE)

    def derivative(self, logits_AW: Tensor) -> Tensor | None:
        """Derivative of the logits by the products, over `scale`; None: 1 everywhere."""
        if self.cap is None:
            return None
        return (logits_AW * (self.temperature / self.cap)).square_().neg_().add_(1)

    def clear_impossible(self, gradient_AW: Tensor, first: int) -> None:
        """Sets the gradient of tokens that are never sampled to 0."""
        columns = self._impossible_columns(first, gradient_AW)
        if columns is not None:
            gradient_AW.index_fill_(1, columns, 0.0)

    def _impossible_columns(self, first: int, tile_AW: Tensor) -> Tensor | None:
        last = first + tile_AW.shape[1]
        columns = [token - first for token in self.impossible if first <= token < last]
        return torch.tensor(columns, device=tile_AW.device) if columns else None


class ActionScores(NamedTuple):
    """Scores of actions under a model, fp32, shape [A]."""

    logprobs_A: Tensor
    entropy_A: Tensor | None
    """Entropy of the distribution that each action was drawn from; None if not requested."""
    collision_A: Tensor | None
    """Sum of that distribution's squared probabilities, without gradient; None if not requested."""


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

    def of(self, actions_A: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each action, shape [A, 1], and whether it is in this tile, shape [A]."""
        columns_A = actions_A - self.first
        inside_A = (columns_A >= 0) & (columns_A < self.last - self.first)
        return columns_A.clamp(0, self.last - self.first - 1)[:, None], inside_A


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
        sums = _RunningSums(states_AD, wanted)
        for tile in _tiles(rows, vocabulary, states_AD.device):
            product_AW = _product(states_AD, weight_VD, bias_V, tile)
            if keeps:
                kept.append(product_AW)
            sums.add(wanted.rule.logits(product_AW, tile.first), tile, actions_A)
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
        for number, tile in enumerate(_tiles(len(states_AD), len(weight_VD), states_AD.device)):
            part = slice(tile.first, tile.last)
            if kept is None:
                product_AW = _product(states_AD, weight_VD, bias_V, tile)
            else:
                product_AW, kept[number] = kept[number], None
            logits_AW = rule.logits(product_AW, tile.first)
            derivative_AW = rule.derivative(logits_AW)
            columns_A1, inside_A = tile.of(actions_A)
            onehot_A1 = inside_A[:, None].float()
            logprobs_AW = logits_AW.sub_(normaliser_A[:, None])
            if with_entropy:
                weights_AW = (logprobs_AW + entropy_A[:, None]).mul_(entropy_gradient_A1).add_(gradient_A1)
                of_logits_AW = logprobs_AW.exp_().mul_(weights_AW).neg_()
                of_logits_AW.scatter_add_(1, columns_A1, onehot_A1 * gradient_A1)
            else:
                of_logits_AW = logprobs_AW.exp_().scatter_add_(1, columns_A1, -onehot_A1)
            if derivative_AW is not None:
                of_logits_AW.mul_(derivative_AW)
            rule.clear_impossible(of_logits_AW, tile.first)
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


class _RunningSums:
    """Sums over the tiles so far, relative to the largest logit so far."""

    def __init__(self, states_AD: Tensor, wanted: _Wanted) -> None:
        self._wanted = wanted
        zeros_A = states_AD.new_zeros(len(states_AD), dtype=torch.float32)
        self._largest_A = zeros_A + IMPOSSIBLE
        self._exponentials_A, self._logits_A, self._squares_A = zeros_A, zeros_A, zeros_A
        self.action_logits_A = zeros_A

    def add(self, logits_AW: Tensor, tile: _Tile, actions_A: Tensor) -> None:
        """Adds a tile; its logits stay as they are."""
        columns_A1, inside_A = tile.of(actions_A)
        self.action_logits_A = torch.where(inside_A, logits_AW.gather(1, columns_A1)[:, 0], self.action_logits_A)
        largest_A = torch.maximum(self._largest_A, logits_AW.amax(1))
        decay_A = (self._largest_A - largest_A).exp_()
        self._largest_A = largest_A
        exponentials_AW = (logits_AW - largest_A[:, None]).exp_()
        self._exponentials_A = self._exponentials_A * decay_A + exponentials_AW.sum(1)
        if self._wanted.collision:
            self._squares_A = self._squares_A * decay_A.square() + exponentials_AW.square().sum(1)
        if self._wanted.entropy != "none":
            self._logits_A = self._logits_A * decay_A + exponentials_AW.mul_(logits_AW).sum(1)

    def normaliser(self) -> Tensor:
        """Logarithm of the sum of the exponentials."""
        return self._largest_A + self._exponentials_A.log()

    def mean_logit(self) -> Tensor:
        """Mean logit under the distribution."""
        return self._logits_A / self._exponentials_A

    def collision(self) -> Tensor:
        """Sum of the squared probabilities."""
        return self._squares_A / self._exponentials_A.square()


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
