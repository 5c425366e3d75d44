"""The order in which ready groups are leased: each gets a key on arrival; a lease takes the lowest keys.

Random samplers are a race of exponential clocks. A group of weight w that arrives when the race stands at V gets the
key V + Exp(1)/w, and V is the largest raced key leased so far. Exponentials are memoryless, so at any moment what is
left of every waiting group's key, key - V, is again Exp(1)/w, whenever the group came; and the smallest of independent
Exp(1)/w belongs to group i with probability w_i/Σw. So the lowest key draws each waiting group with exactly that
probability, and k leases draw k without replacement, each in O(log n) for n ready groups.

The ledger stores V. A group whose lease is returned keeps its key, which is at most V, and the probability of its draw:
it was drawn already. A group that may be used again gets a new key.

A lease of k groups draws those whose key is below the (k+1)-th smallest, the threshold. Given the keys of all others, a
group of weight w is drawn with probability p = 1 - exp(-exposure), exposure = w · (threshold - V), and with p = 1 where
the lease takes everything. So the sum of x/p over the drawn groups is on average the sum of x over all that were ready.

Source: Efraimidis & Spirakis 2006, "Weighted random sampling with a reservoir" (A-ES; its keys u^(1/w) are
exp(-Exp(1)/w)); p, given the threshold: Duffield, Lund & Thorup 2007, "Priority sampling for estimation of arbitrary
subset sums", with exponential keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slipstream.configs.schema.buffer import SamplerConfig

# k groups of one step

LEAST_WEIGHT = 1e-3
"""For `prioritized`: a group without spread has a thousandth of the chance of a group with spread 1."""
MOST_WEIGHT = 1e9
"""For `prioritized`: keeps sums of weights finite at any scale of the rewards."""


@dataclass(frozen=True)
class Order:
    """A group's place among the ready ones."""

    key: float
    """Lower is leased first."""
    raced: bool
    """The store adds the race's V to the key."""
    weight: float
    """The group's share of the race is weight/Σweight; 1 where there is no race."""


def order(
    sampler: SamplerConfig,
    *,
    number: int,
    oldest_version: int,
    rewards: Sequence[float],
    rng: np.random.Generator | None,
) -> Order:
    """The place of a group that becomes ready.

    fifo         by number, the lowest first
    freshest     by oldest version, the newest first; then by number. Exact for versions below 2^20 and numbers below
                 2^32: the key is one float64
    uniform      a race of equal weights
    prioritized  a race with the weight std(rewards)^exponent, held between `LEAST_WEIGHT` and `MOST_WEIGHT`

    Args:
        number: Of the group's ticket.
        oldest_version: Policy version of its oldest action token.
        rewards: Of the answers that are used, one or more.
        rng: May be None without a race (`races`).
    """
    match sampler.name:
        case "fifo":
            return Order(key=float(number), raced=False, weight=1.0)
        case "freshest":
            return Order(key=float(number - oldest_version * 2**32), raced=False, weight=1.0)
        case "uniform":
            return Order(key=_drawn(rng), raced=True, weight=1.0)
        case "prioritized":
            weight = spread_weight(rewards, exponent=sampler.exponent)
            return Order(key=_drawn(rng) / weight, raced=True, weight=weight)


def races(sampler: SamplerConfig) -> bool:
    """True if the sampler draws at random."""
    return sampler.name in ("uniform", "prioritized")


def _drawn(rng: np.random.Generator | None) -> float:
    assert rng is not None, "a race needs random numbers"
    return rng.exponential()


def spread_weight(rewards: Sequence[float], *, exponent: float) -> float:
    """std(rewards)^exponent (population), between `LEAST_WEIGHT` and `MOST_WEIGHT`."""
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is infinite, and `MOST_WEIGHT` is for it
        return float(np.clip(np.std(rewards) ** exponent, LEAST_WEIGHT, MOST_WEIGHT))


def importance_weights(
    weights_k: Sequence[float] | NDArray[np.float64],
    exposures_k: Sequence[float] | NDArray[np.float64],
    *,
    exponent: float,
) -> NDArray[np.float64]:
    """Importance weight of each drawn group: p^-exponent, over the largest of the groups with spread; shape [k].

    p = 1 - exp(-exposure) is the probability of the draw. Groups with spread (a weight above `LEAST_WEIGHT`) weigh at
    most 1. Those without are drawn so rarely that their p^-exponent would scale all others down; they may weigh more.

    Args:
        weights_k: `Order.weight` of the drawn groups.
        exposures_k: positive; infinite where p is 1.
        exponent: 0: all weigh 1; 1: the bias of the selection is fully corrected.

    Raises: ValueError if an exposure is not positive.
    Source: Schaul et al. 2016, "Prioritized Experience Replay", arXiv 1511.05952, §3.4; p takes the place of its
    N·P(i), which is for a single draw.
    """
    weights, exposures = np.asarray(weights_k, dtype=np.float64), np.asarray(exposures_k, dtype=np.float64)
    if not (exposures > 0).all():
        raise ValueError(f"exposures={exposures.tolist()} must be positive")
    logs = -exponent * np.log(-np.expm1(-exposures))
    with_spread = weights > LEAST_WEIGHT
    largest = np.max(logs, where=with_spread if with_spread.any() else True, initial=-np.inf)
    scaled: NDArray[np.float64] = np.exp(logs - largest)
    return scaled


@lru_cache(maxsize=4)
def task_order(tasks: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The task indices in the order in which the epoch issues them, shape [tasks], read-only."""
    order = np.random.default_rng([seed, epoch]).permutation(tasks)
    order.setflags(write=False)  # callers share it through the cache
    return order
