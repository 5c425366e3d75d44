"""Samplers: task order, keys and weights of groups, importance weights."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.policies.sampling import LEAST_WEIGHT, MOST_WEIGHT, Order, importance_weights, order, task_order
from slipstream.configs.schema.buffer import SamplerConfig

RUNS = 4_000


def place(
    name: Literal["fifo", "freshest", "uniform", "prioritized"],
    *,
    number: int = 0,
    version: int = 0,
    rewards: Sequence[float] = (0.0, 1.0),
    exponent: float = 1.0,
    rng: np.random.Generator | None = None,
) -> Order:
    sampler = SamplerConfig(name=name, exponent=exponent)
    return order(sampler, number=number, oldest_version=version, rewards=rewards, rng=rng or np.random.default_rng(0))


class Race:
    """The store's rule: it adds V on arrival, leases the lowest key and sets V to it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.v = 0.0
        self.keys: dict[str, float] = {}
        self._rng = rng

    def arrive(self, name: str, spread: float) -> None:
        drawn = place("prioritized", rewards=(-spread, spread), rng=self._rng)
        assert drawn.raced
        self.keys[name] = self.v + drawn.key

    def lease(self) -> str:
        name = min(self.keys, key=self.keys.__getitem__)
        self.v = self.keys.pop(name)
        return name


@given(st.lists(st.tuples(st.integers(0, 2**20 - 1), st.integers(0, 2**32 - 1)), unique=True, max_size=30))
def test_freshest_orders_by_version_then_number(groups: list[tuple[int, int]]) -> None:
    by_key = sorted(groups, key=lambda group: place("freshest", version=group[0], number=group[1]).key)
    assert by_key == sorted(groups, key=lambda group: (-group[0], group[1]))


def test_freshest_keys_are_distinct_at_range_end() -> None:
    last = place("freshest", version=2**20 - 1, number=2**32 - 1).key
    assert last - place("freshest", version=2**20 - 1, number=2**32 - 2).key == 1.0
    assert last < place("freshest", version=2**20 - 2, number=0).key


@pytest.mark.parametrize("name", ["fifo", "freshest"])
def test_deterministic_samplers_key_by_number(name: Literal["fifo", "freshest"]) -> None:
    assert place(name, number=7) == Order(key=7.0, raced=False, weight=1.0)


@pytest.mark.parametrize("name", ["uniform", "prioritized"])
def test_random_samplers_draw_exponential_keys(name: Literal["uniform", "prioritized"]) -> None:
    rng = np.random.default_rng(0)
    drawn = [place(name, rng=rng) for _ in range(RUNS)]
    assert all(each.raced and each.key >= 0 for each in drawn)
    assert np.mean([each.key * each.weight for each in drawn]) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("rewards", "exponent", "weight"),
    [
        ((-2, 2, -2, 2), 0.0, 1.0), ((-2, 2, -2, 2), 1.0, 2.0), ((-2, 2, -2, 2), 2.0, 4.0),
        ((1, 1, 1), 1.0, LEAST_WEIGHT), ((-1e300, 1e300), 3.0, MOST_WEIGHT),
    ],
)  # fmt: skip
def test_weight_is_reward_spread_to_exponent(rewards: Sequence[float], exponent: float, weight: float) -> None:
    assert place("prioritized", rewards=rewards, exponent=exponent).weight == pytest.approx(weight)


def test_leases_draw_without_replacement() -> None:
    rng = np.random.default_rng(2)
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    seen: Counter[tuple[str, ...]] = Counter()
    for _ in range(RUNS):
        race = Race(rng)
        for name, spread in weights.items():
            race.arrive(name, spread)
        seen[tuple(race.lease() for _ in weights)] += 1
    for first, second, third in permutations(weights):
        expected = weights[first] / 8 * weights[second] / (8 - weights[first])
        assert seen[first, second, third] / RUNS == pytest.approx(expected, abs=0.025)


@given(exposures=st.lists(st.floats(1e-6, 1e3) | st.just(math.inf), max_size=10), exponent=st.floats(0, 1))
def test_importance_weights_are_powers_of_probabilities(exposures: list[float], exponent: float) -> None:
    raw = [(1 - math.exp(-exposure)) ** -exponent for exposure in exposures]
    found = importance_weights([0.5] * len(exposures), exposures, exponent=exponent)
    assert found == pytest.approx([each / max(raw) for each in raw])


def test_groups_without_spread_do_not_scale_importance_weights() -> None:
    weights = importance_weights([LEAST_WEIGHT, 0.5, 0.7], [6e-4, 0.3, 0.42], exponent=0.4)
    rarest = (1 - math.exp(-0.3)) ** -0.4
    assert weights == pytest.approx([6e-4**-0.4 / rarest, 1.0, (1 - math.exp(-0.42)) ** -0.4 / rarest], rel=1e-3)
    assert importance_weights([LEAST_WEIGHT] * 2, [1e-3] * 2, exponent=1.0) == pytest.approx([1.0, 1.0])


def test_group_that_no_race_could_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="exposures="):
        importance_weights([0.5, 0.5], [1.0, 0.0], exponent=0.5)


seeds = st.integers(0, 2**31)


@given(tasks=st.integers(1, 200), seed=seeds, epoch=st.integers(0, 1000))
def test_epoch_is_permutation_of_tasks(tasks: int, seed: int, epoch: int) -> None:
    assert sorted(task_order(tasks, seed=seed, epoch=epoch)) == list(range(tasks))


@given(seed=seeds, epoch=st.integers(0, 1000))
def test_task_order_depends_on_epoch_and_seed(seed: int, epoch: int) -> None:
    order = task_order(100, seed=seed, epoch=epoch)
    assert not np.array_equal(order, task_order(100, seed=seed, epoch=epoch + 1))
    assert not np.array_equal(order, task_order(100, seed=seed + 1, epoch=epoch))


def test_task_order_is_frozen() -> None:
    before = task_order(10, seed=3, epoch=2)
    task_order.cache_clear()
    assert np.array_equal(before, task_order(10, seed=3, epoch=2))
    # Frozen: a run that continues after an upgrade must not repeat or skip tasks.
    assert before.tolist() == [7, 4, 1, 8, 6, 0, 2, 9, 3, 5]


def test_task_order_is_read_only() -> None:
    order = task_order(10, seed=0, epoch=0)
    with pytest.raises(ValueError, match="read-only"):
        order[0] = order[1]
