"""Expected use of generated groups under the admission bound of `store/lua/prelude.lua`.

With fifo a group is used at least once before it is too stale. The other samplers may pass a group by until it is too
stale. That happens where the learner is the bottleneck, so that more groups are ready than a step takes.
"""

import math
from dataclasses import dataclass

import numpy as np

from slipstream.buffer.policies.sampling import Order, order
from slipstream.configs.schema.buffer import BufferConfig, SamplerConfig

MAX_GROUPS = 256
"""Groups in the simulation: larger pipelines are scaled down."""
MAX_STEPS_OF_LIFE = 32
"""Steps before a group is too stale in the simulation: beyond it the figures hardly change."""
LIVES = 12
"""Simulated time, in the time after which a group is too stale; the first quarter is not measured."""


@dataclass(frozen=True)
class Expectation:
    """Mean use of the groups that leave the buffer."""

    never_used: float
    """Share of groups that become too stale before their first use."""
    uses: float
    """Uses of a group."""

    @property
    def log_fields(self) -> dict[str, str | float]:
        """Both figures, rounded."""
        return {"never_used": f"{self.never_used:.0%}", "uses": round(self.uses, 2)}


def uses_per_group(buffer: BufferConfig, *, publish_every_steps: int) -> float:
    """Uses that admission reserves for a group: at most one per step until it is too stale, and the rate limit's."""
    uses = min(buffer.limiter.max_uses, (buffer.max_staleness + 1) * publish_every_steps)
    return max(1.0, min(uses, buffer.limiter.samples_per_insert or math.inf))


def expect_use(buffer: BufferConfig, *, groups_per_step: int, publish_every_steps: int) -> Expectation:
    """Expected use where the learner is the bottleneck: every granted group is ready before the next lease.

    For `prioritized` the rewards are assumed to be 0 or 1, with success rates uniform over the tasks and 8 answers.
    """
    steps_per_version = min(publish_every_steps, MAX_STEPS_OF_LIFE)
    versions = min(buffer.max_staleness + 1, max(1, MAX_STEPS_OF_LIFE // steps_per_version))
    life = versions * steps_per_version
    step_groups = max(4, min(groups_per_step, MAX_GROUPS // life))
    reserved = min(uses_per_group(buffer, publish_every_steps=publish_every_steps), life)
    waiting = _Waiting(buffer.sampler, buffer.limiter.max_uses)
    left: list[int] = []
    for step in range(LIVES * life):
        version, step_of_version = divmod(step, steps_per_version)
        leaving = waiting.expire(version - versions + 1)
        groups = len(waiting.groups)
        remaining = max(groups, reserved * groups - sum(group.uses for group in waiting.groups))
        room = math.floor(((life - step_of_version) * step_groups - remaining) / reserved)
        waiting.add(max(room, step_groups - groups), version)
        leaving += waiting.use(step_groups)
        if step >= LIVES * life // 4:
            left += [group.uses for group in leaving]
    return Expectation(never_used=float(np.mean(np.equal(left, 0))), uses=float(np.mean(left)))


@dataclass
class _Group:
    order: Order
    key: float
    version: int
    uses: int = 0


class _Waiting:
    """Simulated groups that wait for a use."""

    def __init__(self, sampler: SamplerConfig, max_uses: int) -> None:
        self.groups: list[_Group] = []
        self._sampler = sampler
        self._max_uses = max_uses
        self._rng = np.random.default_rng(0)
        self._race = 0.0
        self._number = 0

    def add(self, count: int, version: int) -> None:
        for _ in range(count):
            self._number += 1
            rewards = self._rng.binomial(1, self._rng.random(), 8).tolist()
            place = order(self._sampler, number=self._number, oldest_version=version, rewards=rewards, rng=self._rng)
            self.groups.append(_Group(place, place.key + self._race * place.raced, version))

    def expire(self, oldest_version: int) -> list[_Group]:
        stale = [group for group in self.groups if group.version < oldest_version]
        self.groups = [group for group in self.groups if group.version >= oldest_version]
        return stale

    def use(self, count: int) -> list[_Group]:
        """Uses the first groups of the sampler's order once; returns those that are used up."""
        self.groups.sort(key=lambda group: group.key)
        used = self.groups[:count]
        if used[-1].order.raced:
            self._race = used[-1].key
        for group in used:
            group.uses += 1
            if group.order.raced:
                group.key = self._race + self._rng.exponential() / group.order.weight
        self.groups = [group for group in self.groups if group.uses < self._max_uses]
        return [group for group in used if group.uses >= self._max_uses]
