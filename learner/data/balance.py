"""Balance of a step's work over ranks and micro-batches, by the cost of sequences and trees of them.

FSDP makes the ranks wait for each other at every layer of every micro-batch, so a step takes as long as the slowest
rank in each of them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

EXTRA: Final = 8
"""One micro-batch more is tried, and another for each so many."""


class Work(NamedTuple):
    """The work of sequences that share a micro-batch, or of one."""

    tokens: int
    """Input tokens that are computed."""
    squares: int
    """n² for a sequence of n tokens; b² - a² for its part from a to b. Attention grows with it."""

    @classmethod
    def of_length(cls, tokens: int) -> "Work":
        """The work of a sequence that is computed alone."""
        return cls(tokens, tokens * tokens)


@dataclass(frozen=True)
class SequenceCost:
    """Cost of a sequence of n tokens, n + n² / `even_at`: matrix products grow with n, attention with n²."""

    even_at: float
    """Length at which attention costs as much as the matrix products."""

    def __call__(self, work: Work) -> float:
        """Cost in units of a token's matrix products."""
        return work.tokens + work.squares / self.even_at

    @classmethod
    def of_model(cls, folder: Path) -> "SequenceCost":
        """The cost under the model in a folder, from its config.json."""
        whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls.of_config(whole.get("text_config", whole))

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "SequenceCost":
        """The cost under a decoder with these values of a transformers config.

        A key that a family calls otherwise counts as that of a plain transformer: the cost only ranks sequences.
        """
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config.get("num_attention_heads", 1)
        head_size = config.get("head_dim") or hidden / heads
        attention = 2 * hidden * head_size * (heads + config.get("num_key_value_heads", heads))
        width = config.get("intermediate_size", 4 * hidden)
        if experts := config.get("num_experts_per_tok"):
            width = experts * config.get("moe_intermediate_size", width)
        products = layers * (attention + 3 * hidden * width) + hidden * config["vocab_size"]
        kinds = config.get("layer_types") or ["full_attention"] * layers
        # In FLOPs of a forward pass: 2 per weight and token; 4 · heads · head size per pair of tokens, half of them
        # masked. Windows and linear attention grow with n.
        return cls(even_at=products / (max(1, kinds.count("full_attention")) * heads * head_size))


def spread(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Indices of the costs in `bins` parts of nearly equal sums, each in ascending order.

    The largest go first, each to the part with the least (LPT): at most 4/3 of the best possible maximum (Graham 1969).
    Each part gets one, if there are enough.
    """
    parts: list[list[int]] = [[] for _ in range(bins)]
    sums = [0.0] * bins
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = sums.index(min(sums))
        parts[least].append(index)
        sums[least] += costs[index]
    return [sorted(part) for part in parts]


def first_fit(items: Sequence[Work], *, budget: int) -> list[list[int]]:
    """Indices of sequences (or trees of them) by micro-batch, of at most `budget` tokens each, longest first.

    Args:
        items: one that is longer than the budget gets a micro-batch of its own.
    """
    tokens = [item.tokens for item in items]
    bins: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(items):
        fitting = next((n for n, left in enumerate(room) if tokens[index] <= left), None)
        if fitting is None:
            bins.append([index])
            room.append(budget - tokens[index])
        else:
            bins[fitting].append(index)
            room[fitting] -= tokens[index]
    return bins


@dataclass(frozen=True)
class MicroBatchPlan:
    """Micro-batches of equal number on all ranks, and of nearly equal costs."""

    micro_batches: int
    """At least as many as `first_fit` finds on any rank."""
    cost: SequenceCost

    def fill(self, items: Sequence[Work], *, budget: int) -> list[list[int]]:
        """As `first_fit`; the most expensive micro-batch first, as on all ranks. Fewer if there are fewer items."""
        bins: list[list[int]] = [[] for _ in range(min(self.micro_batches, len(items)))]
        filled, sums = [0] * len(bins), [0.0] * len(bins)
        for index in _longest_first(items):
            fitting = [n for n in range(len(bins)) if not bins[n] or filled[n] + items[index].tokens <= budget]
            if not fitting:  # almost full ones: balanced enough
                return first_fit(items, budget=budget)
            chosen = min(fitting, key=lambda n: sums[n])
            bins[chosen].append(index)
            filled[chosen] += items[index].tokens
            sums[chosen] += self.cost(items[index])
        return sorted(bins, key=lambda chosen: -sum(self.cost(items[index]) for index in chosen))

    def slowest(self, of_ranks: Sequence[Sequence[Work]], *, budget: int) -> float:
        """Sum over the micro-batches of the slowest rank's cost in each.

        Args:
            of_ranks: work of each rank's items.
        """
        costs = [
            [sum(self.cost(items[index]) for index in chosen) for chosen in self.fill(items, budget=budget)]
            for items in of_ranks
        ]
        return sum(map(max, zip_longest(*costs, fillvalue=0.0)))


def _longest_first(items: Sequence[Work]) -> list[int]:
    return sorted(range(len(items)), key=lambda i: -items[i].tokens)


def balance_groups(
    works: Sequence[Sequence[Work]], ranks: int, *, budget: int, cost: SequenceCost
) -> tuple[list[list[int]], MicroBatchPlan]:
    """Indices of an update's groups by rank, and its micro-batches; the same on all ranks.

    Groups stay whole, because advantages compare the answers of one.

    Args:
        works: work of each group's sequences, or trees of them.
    """
    groups = spread([sum(map(cost, group)) for group in works], ranks)
    works_of_rank = [[work for index in indices for work in works[index]] for indices in groups]
    least = max(len(first_fit(items, budget=budget)) for items in works_of_rank)
    # One with more room may be so much better balanced that it is faster.
    plans = [MicroBatchPlan(count, cost) for count in range(least, least + 2 + least // EXTRA)]
    return groups, min(plans, key=lambda plan: plan.slowest(works_of_rank, budget=budget))
