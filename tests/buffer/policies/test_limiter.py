"""How far uses and insertions may run ahead of each other."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slipstream.buffer.policies.limiter import ROUNDING, Bounds, bounds, may_insert, may_lease
from slipstream.configs.schema.limiter import LimiterConfig, smallest_tolerance

ratios = st.builds(Fraction, st.integers(1, 12), st.integers(1, 6)).map(float)
steps = st.integers(1, 6)
least = st.integers(0, 8)


def limits(ratio: float, tolerance: float, min_ready: int = 0) -> Bounds:
    made = bounds(LimiterConfig(samples_per_insert=ratio, tolerance=tolerance, min_ready=min_ready))
    assert made is not None
    return made


@dataclass
class Buffer:
    """Groups that can be used `max_uses` times each, under the limiter."""

    limits: Bounds
    step: int
    max_uses: int
    inserts: int = 0
    samples: int = 0
    uses_left: list[int] = field(default_factory=list)

    @property
    def diff(self) -> float:
        return self.inserts * self.limits.samples_per_insert - self.samples

    def can_insert(self) -> bool:
        return may_insert(self.limits, inserts=self.inserts, samples=self.samples, count=1)

    def can_lease(self) -> bool:
        allowed = may_lease(self.limits, inserts=self.inserts, samples=self.samples, count=self.step)
        return allowed and len(self.uses_left) >= self.step

    def insert(self) -> None:
        self.inserts += 1
        self.uses_left.append(self.max_uses)

    def lease(self, pick: Callable[[list[int]], list[int]]) -> None:
        """Uses the groups at the picked places once."""
        self.samples += self.step
        for index in pick(list(range(len(self.uses_left)))):
            self.uses_left[index] -= 1
        self.uses_left = [left for left in self.uses_left if left]

    def locked(self) -> bool:
        return not self.can_insert() and not self.can_lease()


def test_nothing_configured_sets_no_bounds() -> None:
    assert bounds(LimiterConfig()) is None


def test_min_ready_alone_only_delays_the_first_lease() -> None:
    made = bounds(LimiterConfig(min_ready=3))
    assert made is not None
    assert not may_lease(made, inserts=2, samples=0, count=1)
    assert may_lease(made, inserts=3, samples=0, count=1)
    assert may_lease(made, inserts=3, samples=10**9, count=10**9)
    assert may_insert(made, inserts=10**9, samples=0, count=10**9)


def test_the_bounds_are_reverbs() -> None:
    assert limits(2.0, 3.0, min_ready=5) == Bounds(min_diff=7.0, max_diff=13.0, samples_per_insert=2.0, min_ready=5)


def test_leases_stop_at_the_lower_bound_and_insertions_at_the_upper() -> None:
    made = limits(1.0, 4.0)
    assert may_lease(made, inserts=4, samples=4, count=4)
    assert not may_lease(made, inserts=4, samples=5, count=4)
    assert may_insert(made, inserts=3, samples=0, count=1)
    assert not may_insert(made, inserts=4, samples=0, count=1)
    assert not may_insert(made, inserts=3, samples=0, count=2)


@given(ratio=ratios, step=steps, min_ready=least, spare=st.floats(0, 3), data=st.data())
def test_whoever_follows_the_limiter_stays_within_the_bounds_and_never_locks(
    ratio: float, step: int, min_ready: int, spare: float, data: st.DataObject
) -> None:
    tolerance = smallest_tolerance(samples_per_insert=ratio, groups_per_step=step, min_ready=min_ready) + spare
    made = limits(ratio, tolerance, min_ready)
    max_uses = math.ceil(ratio) + data.draw(st.integers(0, 2), label="more uses")
    buffer = Buffer(made, step, max_uses)
    rng = data.draw(st.randoms(use_true_random=False))
    eagerness = data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]), label="chance that insertion goes first")
    started = False
    for _ in range(150):
        assert not buffer.locked(), buffer
        if buffer.can_insert() and (not buffer.can_lease() or rng.random() < eagerness):
            buffer.insert()
        else:
            buffer.lease(lambda places: rng.sample(places, step))
        started = started or buffer.inserts >= min_ready
        assert buffer.diff <= made.max_diff + ROUNDING
        assert not started or buffer.diff >= made.min_diff - ROUNDING


@given(ratio=ratios, step=steps, min_ready=least, eager=st.booleans())
def test_a_smaller_tolerance_locks_both_sides_whoever_goes_first(
    ratio: float, step: int, min_ready: int, eager: bool
) -> None:
    tolerance = smallest_tolerance(samples_per_insert=ratio, groups_per_step=step, min_ready=min_ready) - 1e-3
    assume(tolerance >= 0)
    buffer = Buffer(limits(ratio, tolerance, min_ready), step, max_uses=math.ceil(ratio))
    for _ in range(2000):
        if buffer.locked():
            return
        if buffer.can_insert() and (eager or not buffer.can_lease()):
            buffer.insert()
        else:
            buffer.lease(lambda places: places[:step])
    pytest.fail(f"{buffer} still moves")


@pytest.mark.parametrize(
    ("ratio", "step", "min_ready", "tolerance"),
    [
        (1.0, 1, 0, 1.0),  # Reverb's max(1, samples_per_insert)
        (1.0, 4, 0, 4.0),  # the first step must fit in
        (1.0, 4, 4, 2.0),  # it stands ready: half of insertion and lease, on the multiples of 1
        (2.0, 4, 4, 2.0),  # on the multiples of 2
        (0.1, 1, 1, 0.5),
        (math.pi, 4, 4, (math.pi + 4) / 2),
    ],
)
def test_the_smallest_tolerance_of_some_configurations(
    ratio: float, step: int, min_ready: int, tolerance: float
) -> None:
    found = smallest_tolerance(samples_per_insert=ratio, groups_per_step=step, min_ready=min_ready)
    assert found == pytest.approx(tolerance)


@given(ratio=ratios)
def test_for_single_leases_it_asks_for_no_more_than_reverb(ratio: float) -> None:
    assert smallest_tolerance(samples_per_insert=ratio, groups_per_step=1) <= max(1.0, ratio)


def test_rounding_does_not_stop_a_lease_that_is_due() -> None:
    assert 3 * 0.1 > 0.3
    assert may_insert(limits(0.1, 0.3), inserts=2, samples=0, count=1)
