"""Balance of a step's work over ranks and micro-batches."""

from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.data.balance import MicroBatchPlan, SequenceCost, Work, balance_groups, first_fit, spread
from slipstream.learner.data.buffer_feed import partition_groups

COST = SequenceCost(even_at=54_000)
BUDGET = 32_768
QWEN3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12_288, "vocab_size": 151_936,
}  # fmt: skip


def groups_of_answers(count: int) -> list[list[Work]]:
    """Groups of 8 answers with log-normal lengths."""
    lengths = np.random.default_rng(0).lognormal(np.log(2000), 1.0, (count, 8))
    return [[Work.of_length(each) for each in row] for row in np.clip(lengths, 2, 32_768).astype(int).tolist()]


def imbalance(own: Sequence[Sequence[Work]], batches: Sequence[Sequence[Sequence[int]]]) -> tuple[float, float]:
    """The largest cost of a rank by the mean, and the same of ranks that wait for each other at every micro-batch.

    Args:
        own: work of each rank's sequences.
        batches: their indices by micro-batch.
    """
    totals = [sum(map(COST, works)) for works in own]
    costs = [
        [sum(COST(works[index]) for index in chosen) for chosen in of_rank]
        for works, of_rank in zip(own, batches, strict=True)
    ]
    slowest = sum(map(max, zip_longest(*costs, fillvalue=0.0)))
    return max(totals) / fmean(totals), slowest / fmean(totals)


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=40), st.integers(1, 8))
def test_spread_covers_every_index_once(costs: list[float], bins: int) -> None:
    parts = spread(costs, bins)
    assert sorted(index for part in parts for index in part) == list(range(len(costs)))
    assert min(map(len, parts)) >= min(1, len(costs) // bins)
    sums = [sum(costs[index] for index in part) for part in parts]
    # Graham's bound, with the mean and the largest cost for the best possible maximum.
    assert max(sums) <= (sum(costs) / bins + max(costs)) * (1 + 1e-9)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 12))
def test_level_micro_batches_keep_budget(tokens: list[int], wanted: int) -> None:
    works = [Work.of_length(each) for each in tokens]
    least = len(first_fit(works, budget=60))
    chosen = MicroBatchPlan(max(wanted, least), COST).fill(works, budget=60)
    assert sorted(index for batch in chosen for index in batch) == list(range(len(tokens)))
    assert least <= len(chosen) <= max(wanted, least)
    for batch in chosen:
        lengths = [tokens[index] for index in batch]
        assert sum(lengths) <= 60 or len(lengths) == 1
        assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("groups", "ranks"), [(64, 8), (32, 8), (512, 64)])
def test_ranks_share_log_normal_lengths_by_cost(groups: int, ranks: int) -> None:
    works = groups_of_answers(groups)
    assigned = [partition_groups(groups, updates=1, rank=rank, world_size=ranks)[0] for rank in range(ranks)]
    own = [[work for index in share for work in works[index]] for share in assigned]
    total_before, slowest_before = imbalance(own, [first_fit(each, budget=BUDGET) for each in own])
    shares, plan = balance_groups(works, ranks, budget=BUDGET, cost=COST)
    own = [[work for index in share for work in works[index]] for share in shares]
    batches = [plan.fill(each, budget=BUDGET) for each in own]
    total, slowest = imbalance(own, batches)
    assert {len(of_rank) for of_rank in batches} == {plan.micro_batches}
    assert total < 1.05 < total_before
    assert slowest < slowest_before - 0.1


def test_attention_costs_as_much_as_products_at_54k_tokens_in_qwen3_8b() -> None:
    cost = SequenceCost.of_config(QWEN3_8B)
    # 7.57e9 weights without the embedding; 36 layers of 32 heads of 128.
    assert cost.even_at == pytest.approx(7.57e9 / (36 * 4096), rel=0.01)
    windowed = QWEN3_8B | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 6}
    assert SequenceCost.of_config(windowed).even_at == pytest.approx(6 * cost.even_at)
    sparse = QWEN3_8B | {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
    assert SequenceCost.of_config(sparse).even_at == pytest.approx(cost.even_at * 4.85 / 7.57, rel=0.01)
