"""Mixtures of experts: routers in fp32, replay of the experts that an engine chose, load of the experts.

# N packed input tokens, M layers with experts, E experts of a layer, K of them chosen for a token
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.parallel.mesh import World
from slipstream.models.architecture import router_sizes

log = get_log("learner.moe")

COUNTS = 3
"""Number of counts of a layer beside the loads: tokens, tokens with given experts, those whose router chose others."""

ROUTED_EXPERTS = "routed_experts"
"""Argument of a model's forward pass, shape [1, N, M, K]: experts to choose, -1 where the router chooses."""
PADDING_TOKENS = "padding_tokens"
"""Argument of a model's forward pass: number of the last tokens that are of no sequence."""


class Layout(NamedTuple):
    """Sizes of a model's choices of experts: layers that have some, experts of a token and of a layer."""

    layers: int
    per_token: int
    experts: int


class Routing:
    """The choice of experts in one layer.

    Attributes:
        experts, per_token: E and K.
        replays: use the experts that are given.
        record: where not None, receives the experts of each pass, shape [N, K].
    """

    def __init__(self, module: Any, *, replays: bool) -> None:
        """`module`: a router of transformers; its forward pass is replaced."""
        self.experts, self.per_token = router_sizes(module) or (0, 0)
        self.replays = replays
        self.record: list[Tensor] | None = None
        self._given_NK: Tensor | None = None
        self._padding = 0
        self._forward = module.forward
        self._counts = torch.zeros(self.experts + COUNTS, dtype=torch.float64, device="cpu")
        # An attribute of this module alone, which FSDP leaves as it is. Dynamo can't trace the mode in it.
        module.forward = torch.compiler.disable(self._choose)
        module.routing = self

    def give(self, given_NK: Tensor | None, *, padding: int = 0) -> None:
        """Sets the experts of the next forward pass, -1 where the router chooses; None: everywhere.

        Args:
            padding: number of its last tokens that do not count.
        """
        self._given_NK = given_NK if self.replays else None
        self._padding = padding

    def take_counts(self) -> Tensor:
        """Tokens of each expert and `COUNTS` since the last call, float64, shape [E + COUNTS]."""
        counts, self._counts = self._counts, torch.zeros_like(self._counts)
        return counts

    def _choose(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        with _TopK(self) as chosen:
            result = self._forward(hidden_states, *arguments, **named)
        if chosen.times != 1:
            raise ConfigError(
                f"a {type(self._forward.__self__).__name__} can't be trained by this learner: it chooses its experts "
                "otherwise than by one topk of their scores; choose another model"
            )
        return result

    def replayed(self, scores_NE: Tensor, own_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, with gradient, and ids of the experts of each token; counts them.

        Args:
            own_NK: the router's choice.
        """
        chosen_NK, given_NK = own_NK, self._given_NK
        if given_NK is not None:
            given_NK = given_NK.to(own_NK)
            if given_NK.shape != own_NK.shape:
                raise ValueError(f"replayed experts of shape {given_NK.shape}, the router's {own_NK.shape}")
            chosen_NK = torch.where(given_NK >= 0, given_NK, own_NK)
        if self.record is not None:
            self.record.append(chosen_NK)
        if torch.is_grad_enabled():
            self._count(chosen_NK, own_NK, given_NK)
        return scores_NE.gather(1, chosen_NK), chosen_NK

    def _count(self, chosen_NK: Tensor, own_NK: Tensor, given_NK: Tensor | None) -> None:
        counted = slice(len(chosen_NK) - self._padding)
        chosen_NK, own_NK = chosen_NK[counted], own_NK[counted]
        self._counts = self._counts.to(chosen_NK.device)
        ids = chosen_NK.flatten()
        self._counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float64))
        self._counts[-COUNTS] += len(chosen_NK)
        if given_NK is not None:
            given_NK = given_NK[counted]
            given_N = given_NK[:, 0] >= 0
            agrees_N = (given_NK[:, :, None] == own_NK[:, None, :]).any(-1).all(-1)
            self._counts[1 - COUNTS] += given_N.sum()
            self._counts[2 - COUNTS] += (given_N & ~agrees_N).sum()


class _TopK(TorchFunctionMode):
    """Replaces the experts that a router finds by topk.

    Attributes:
        times: number of topk calls over all experts.
    """

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self._routing = routing
        self.times = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, routing = args[0], self._routing
        # Some routers first choose groups of experts: these calls have other shapes.
        if scores.shape[1:] != (routing.experts,) or result.indices.shape[1:] != (routing.per_token,):
            return result
        self.times += 1
        return type(result)(routing.replayed(scores, result.indices))


def routers(module: nn.Module) -> list[nn.Module]:
    """The routers inside a module, in the order of the layers."""
    return [router for router in module.modules() if router_sizes(router) is not None]


def layout_of(model: nn.Module) -> Layout | None:
    """Sizes of a model's choices of experts; None if it has no experts."""
    sizes = [found for module in model.modules() if (found := router_sizes(module)) is not None]
    if not sizes:
        return None
    experts, per_token = sizes[0]
    return Layout(layers=len(sizes), per_token=per_token, experts=experts)


def prepare_experts(model: Any, layers: nn.ModuleList, *, replays: bool) -> None:
    """Prepares a transformers model for training if it has experts; before it is sharded.

    Args:
        layers: of its decoder.
        replays: use the experts in `ROUTED_EXPERTS`; otherwise they are ignored.

    Raises: ConfigError when they should be used, but there are none.
    """
    layout = layout_of(layers)
    if layout is None and replays:
        raise ConfigError(f"learner.router_replay: a {type(model).__name__} has no experts; leave it out")
    if layout is None:
        return
    number = 0
    for layer in layers:
        routings = [Routing(router, replays=replays) for router in routers(layer)]
        layer.register_forward_pre_hook(_Give(routings, first=number), with_kwargs=True)
        number += len(routings)
    products = getattr(model.config, "_experts_implementation", None) or "eager"
    (log.info if products == "grouped_mm" else log.warning)(
        "mixture of experts",
        layers=layout.layers,
        experts=layout.experts,
        per_token=layout.per_token,
        matrix_products=products,
        router="float32",
        replay=replays,
    )


class _Give:
    """Hook before the forward pass of a layer: takes the experts of its routers, and padding, out of the arguments.

    It also runs when activation checkpointing repeats the pass, with the same arguments.
    """

    def __init__(self, routings: Sequence[Routing], *, first: int) -> None:
        self._routings = routings
        self._first = first

    def __call__(self, _layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given_1NMK, padding = kwargs.pop(ROUTED_EXPERTS, None), kwargs.pop(PADDING_TOKENS, 0)
        for number, routing in enumerate(self._routings, start=self._first):
            routing.give(None if given_1NMK is None else given_1NMK[0, :, number], padding=padding)
        return args, kwargs


@contextmanager
def recorded_experts(decoder: nn.Module) -> Iterator[list[Tensor]]:
    """Context that records the experts of its passes: the list then has them for all tokens, shape [1, N, M, K].

    It stays empty without experts.
    """
    experts, routings = list[Tensor](), _routings(decoder)
    for routing in routings:
        routing.record = []
    try:
        yield experts
        if routings:
            experts.append(torch.stack([torch.cat(routing.record or []) for routing in routings], dim=1)[None])
    finally:
        for routing in routings:
            routing.record = None


@contextmanager
def replayed_experts(decoder: nn.Module) -> Iterator[None]:
    """Context in which passes use the experts that are given, whatever is configured."""
    routings = _routings(decoder)
    originals = [routing.replays for routing in routings]
    for routing in routings:
        routing.replays = True
    try:
        yield
    finally:
        for routing, replays in zip(routings, originals, strict=True):
            routing.replays = replays


def _routings(model: nn.Module) -> list[Routing]:
    """Routings of the model's routers, in the order of the layers."""
    return [routing for module in model.modules() if isinstance(routing := getattr(module, "routing", None), Routing)]


def expert_metrics(model: nn.Module, world: World) -> dict[str, float]:
    """Metrics of the forward passes with gradient since the last call, on all ranks; empty without experts.

    A collective. `experts/load_max` is the largest load of an expert over the mean of its layer, and `experts/idle` the
    share of experts without a token, both averaged over the layers; `experts/replayed` is the share of tokens whose
    experts were given, and `experts/changed` the share of those for which the router would have chosen others.
    """
    routings = _routings(model)
    if not routings:
        return {}
    counts = [routing.take_counts() for routing in routings]
    # Also over the ranks with the same rows: those along `cp` have other tokens of them. Those along `tp` have the same
    # tokens, which leaves these ratios as they are.
    sums = world.sum_of_all(torch.cat(counts).to(world.device)).split([len(count) for count in counts])
    tokens, given, changed = torch.stack([layer_sums[-COUNTS:] for layer_sums in sums]).sum(0).tolist()
    if not tokens:
        return {}
    loads = [layer_sums[:-COUNTS] for layer_sums in sums]
    metrics = {
        "experts/load_max": _mean([(load.max() / load.mean()).item() for load in loads]),
        "experts/idle": _mean([(load == 0).double().mean().item() for load in loads]),
    }
    if given:
        metrics |= {"experts/replayed": given / tokens, "experts/changed": changed / given}
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
