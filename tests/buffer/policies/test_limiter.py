"""The rate limiter: bounds on uses minus insertions."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slipstream.buffer.policies.admission import Bounds, bounds
from slipstream.configs.schema.buffer import LimiterConfig, smallest_tolerance
from tests.buffer.policies.limits import may_insert, may_lease

ratios = st.builds(Fraction, st.integers(1, 12), st.integers(1, 6)).map(float)
steps = st.integers(1, 6)
least = st.integers(0, 8)


def limits(ratio: float, tolerance: float, min_ready: int = 0) -> Bounds:
    return bounds(LimiterConfig(samples_per_insert=ratio, tolerance=tolerance, min_ready=min_ready))


@dataclass
class Group:
    """A stored group."""

    version: int
    uses: int = 0


@dataclass
class Buffer:
    """A model of the buffer: groups of `max_uses` uses under limiter, admission and expiry."""

    limits: Bounds
    step: int
    max_uses: int
    steps_per_version: int = 1
    max_staleness: int = 10**6
    arrived: int = 0
    steps: int = 0
    groups: list[Group] = field(default_factory=list)

    @property
    def version(self) -> int:
        return self.steps // self.steps_per_version

    @property
    def counted(self) -> dict[str, int]:
        return {"inserts": len(self.groups), "samples": sum(group.uses for group in self.groups)}

    def room(self) -> int:
        """The admission of `lua/prelude.lua`."""
        life = (self.max_staleness + 1) * self.steps_per_version
        uses = max(1.0, min(self.max_uses, life, self.limits.samples_per_insert))
        remaining = max(len(self.groups), uses * len(self.groups) - sum(group.uses for group in self.groups))
        left = (life - self.steps % self.steps_per_version) * self.step
        return max(math.floor((left - remaining) / uses), self.step - len(self.groups))

    def can_insert(self) -> bool:
        return self.room() > 0 and may_insert(self.limits, **self.counted, count=1)

    def can_lease(self) -> bool:
        self.groups = [group for group in self.groups if group.version >= self.version - self.max_staleness]
        return len(self.groups) >= self.step and may_lease(
            self.limits, arrived=self.arrived, **self.counted, count=self.step, coming=self.room() > 0
        )

    def insert(self, *, lag: int = 0) -> None:
        self.arrived += 1
        self.groups.append(Group(max(0, self.version - lag)))

    def lease(self, pick: Callable[[list[Group]], list[Group]]) -> None:
        """Uses the picked groups once."""
        for group in pick(self.groups):
            group.uses += 1
        self.groups = [group for group in self.groups if group.uses < self.max_uses]
        self.steps += 1

    def locked(self) -> bool:
        return not self.can_lease() and not self.can_insert()


def test_bounds_match_reverb() -> None:
    assert limits(2.0, 3.0, min_ready=5) == Bounds(min_diff=7.0, max_diff=13.0, samples_per_insert=2.0, min_ready=5)


@given(ratio=ratios, step=steps, min_ready=least, spare=st.floats(0, 3), data=st.data())
def test_smallest_tolerance_never_deadlocks(
    ratio: float, step: int, min_ready: int, spare: float, data: st.DataObject
) -> None:
    tolerance = smallest_tolerance(samples_per_insert=ratio, groups_per_step=step, min_ready=min_ready) + spare
    buffer = Buffer(
        limits(ratio, tolerance, min_ready),
        step,
        max_uses=math.ceil(ratio) + data.draw(st.integers(0, 2), label="more uses"),
        steps_per_version=data.draw(st.integers(1, 3), label="steps per version"),
        max_staleness=data.draw(st.integers(0, 3), label="max_staleness"),
    )
    rng = random.Random(data.draw(st.integers(0), label="seed"))
    eagerness = data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]), label="chance that insertion goes first")
    for _ in range(150):
        assert not buffer.locked(), buffer
        if buffer.can_insert() and (not buffer.can_lease() or rng.random() < eagerness):
            buffer.insert(lag=rng.randint(0, buffer.max_staleness))
        else:
            buffer.lease(lambda groups: rng.sample(groups, step))


@given(ratio=st.integers(1, 12), step=steps, min_ready=least, eager=st.booleans())
def test_smaller_tolerance_deadlocks(ratio: int, step: int, min_ready: int, eager: bool) -> None:
    assume(math.gcd(ratio, step) == 1)  # otherwise only expiring groups deadlock it
    tolerance = smallest_tolerance(samples_per_insert=ratio, groups_per_step=step, min_ready=min_ready) - 1e-3
    assume(tolerance >= 0)
    buffer = Buffer(limits(ratio, tolerance, min_ready), step, max_uses=ratio)
    for _ in range(2000):
        if buffer.locked():
            return
        if buffer.can_insert() and (eager or not buffer.can_lease()):
            buffer.insert()
        else:
            buffer.lease(lambda groups: groups[:step])
    pytest.fail(f"{buffer} does not deadlock")


@pytest.mark.parametrize(
    ("ratio", "step", "min_ready", "tolerance"),
    [
        (1.0, 1, 0, 1.0),  # Reverb's max(1, samples_per_insert)
        (1.0, 4, 0, 4.0),  # the first step must fit in
        (1.0, 4, 4, 2.0),  # half of insertion and lease, in multiples of 1
        (2.0, 4, 4, 3.0),  # not in multiples of 2: expired groups may have been used once
        (0.1, 1, 1, 0.5),
        (math.pi, 4, 4, (math.pi + 4) / 2),
    ],
)
def test_smallest_tolerance_values(ratio: float, step: int, min_ready: int, tolerance: float) -> None:
    found = smallest_tolerance(samples_per_insert=ratio, groups_per_step=step, min_ready=min_ready)
    assert found == pytest.approx(tolerance)


@given(ratio=ratios)
def test_smallest_tolerance_is_within_reverbs(ratio: float) -> None:
    assert smallest_tolerance(samples_per_insert=ratio, groups_per_step=1) <= max(1.0, ratio)
