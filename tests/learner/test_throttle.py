"""The throttle of the staleness bound, on scripted metrics."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.configs.schema.learner import ThrottleConfig
from slipstream.learner.throttle import Action, Throttle

GOOD = {"ess": 0.9, "kl_k3": 0.01, "masked_fraction": 0.0}
BAD = {"ess": 0.31, "kl_k3": 0.01, "masked_fraction": 0.0}


def throttle(max_staleness: int = 8, *, smoothing: float = 0.0, calm_steps: int = 3, **keys: Any) -> Throttle:
    """A throttle without smoothing, which changes the bound after few steps."""
    config = ThrottleConfig(**{"hold_steps": 2, **keys})
    return Throttle(config, max_staleness, smoothing=smoothing, calm_steps=calm_steps)


def bounds(throttled: Throttle, *figures: dict[str, float]) -> list[int]:
    """The effective bound after each step."""
    found = []
    for each in figures:
        throttled.observe(each)
        found.append(throttled.max_staleness)
    return found


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({"ess": 0.31}, "ess 0.31 < 0.5"), ({"kl_k3": 0.25}, "kl_k3 0.25 > 0.1"),
        ({"masked_fraction": 0.75}, "masked_fraction 0.75 > 0.5"), ({"mismatch_abs": 0.06}, "mismatch_abs 0.06 > 0.05"),
        ({"ess": 0.4, "kl_k3": 0.2, "masked_fraction": 0.1}, "ess 0.4 < 0.5, kl_k3 0.2 > 0.1"),
        ({"ess": math.nan}, "ess nan"), ({"kl_k3": math.inf}, "kl_k3 inf"),
    ],
)  # fmt: skip
def test_breach_halves_bound_and_is_named(figures: dict[str, float], cause: str) -> None:
    assert throttle(max_mismatch=0.05).observe(figures) == Action(4, 1.0, cause, "down")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"hold_steps": 2}, [4, 4, 4, 2, 2, 2, 1, 1]),
        ({"hold_steps": 0, "min_staleness": 1}, [4, 2, 1, 1, 1]),
        ({"hold_steps": 0, "max_staleness": 3}, [1, 0, 0]),
    ],
    ids=["held", "minimum", "on-policy"],
)
def test_breaches_lower_bound(keys: dict[str, Any], expected: list[int]) -> None:
    assert bounds(throttle(**keys), *[BAD] * len(expected)) == expected


def test_missing_and_unlimited_metrics_are_skipped() -> None:
    throttled = throttle(min_ess=None)
    assert throttled.observe({}) is None
    assert throttled.observe({"ess": 0.01, "reward": math.nan, "mismatch_abs": 9.0}) is None
    assert throttled.max_staleness == 8


def test_single_bad_step_is_smoothed_away() -> None:
    throttled = throttle(smoothing=0.8)
    assert bounds(throttled, GOOD, BAD, GOOD, BAD) == [8] * 4
    actions = [throttled.observe(BAD) for _ in range(8)]
    first = next(number for number, action in enumerate(actions) if action is not None)
    assert first > 2, "persistent bad steps are not"


def test_nan_does_not_enter_average() -> None:
    throttled = throttle(smoothing=0.8, hold_steps=0)
    assert bounds(throttled, GOOD, {**GOOD, "kl_k3": math.nan}, GOOD, GOOD) == [8, 4, 4, 4]


def test_consecutive_calm_steps_raise_bound_by_one() -> None:
    throttled = throttle(calm_steps=3)
    throttled.observe(BAD)
    assert bounds(throttled, *[GOOD] * 7) == [4, 4, 5, 5, 5, 6, 6]
    throttled.observe(GOOD)
    assert throttled.observe(GOOD) == Action(7, 1.0, "calm for 3 steps", "up")


@pytest.mark.parametrize("between", [{"ess": 0.74}, {"kl_k3": 0.051}, {"masked_fraction": 0.26}])
def test_metric_between_calm_and_limit_keeps_bound(between: dict[str, float]) -> None:
    throttled = throttle(calm_steps=3)
    throttled.observe(BAD)
    assert bounds(throttled, *[GOOD | between] * 20) == [4] * 20
    assert bounds(throttled, GOOD, GOOD, GOOD | between, GOOD, GOOD, GOOD) == [4] * 5 + [5], "counting starts again"


def test_step_without_metrics_does_not_count() -> None:
    throttled = throttle(calm_steps=3)
    throttled.observe(BAD)
    assert bounds(throttled, GOOD, {}, GOOD, {}, GOOD) == [4, 4, 4, 4, 5]


def test_learning_rate_follows_bound_if_configured() -> None:
    throttled = throttle(learning_rate=True, hold_steps=0, calm_steps=1, min_staleness=4)
    scales = []
    for figures in [BAD] * 5 + [GOOD] * 5:
        throttled.observe(figures)
        scales.append(throttled.lr_scale)
    assert scales == [0.5, 0.25, 0.125, 0.1, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    unscaled = throttle(hold_steps=0)
    assert {unscaled.lr_scale for _ in bounds(unscaled, *[BAD] * 5)} == {1.0}


SOME = st.fixed_dictionaries(
    {},
    optional={
        "ess": st.floats(0, 1) | st.just(math.nan),
        "kl_k3": st.floats(0, 1) | st.just(math.inf),
        "masked_fraction": st.floats(0, 1),
    },
)


@given(before=st.lists(SOME, max_size=20), after=st.lists(SOME, max_size=20))
@settings(max_examples=50)
def test_restored_throttle_continues(before: list[dict[str, float]], after: list[dict[str, float]]) -> None:
    keys: dict[str, Any] = {"smoothing": 0.5, "calm_steps": 2, "learning_rate": True}
    first, second = throttle(**keys), throttle(**keys)
    assert first.state().keys() == second.state().keys()
    bounds(first, *before)
    second.restore(json.loads(json.dumps(first.state())))
    assert [first.observe(figures) for figures in after] == [second.observe(figures) for figures in after]


def test_restored_throttle_obeys_changed_configuration() -> None:
    cut = throttle(learning_rate=True)
    cut.observe(BAD)
    raised = throttle(min_staleness=6)
    raised.restore(cut.state())
    assert (raised.max_staleness, raised.lr_scale) == (6, 1.0)
    lowered = throttle(max_staleness=2)
    lowered.restore(cut.state())
    assert lowered.max_staleness == 2


@settings(max_examples=100)
@given(
    most=st.integers(0, 20), least=st.integers(0, 20), hold_steps=st.integers(0, 3), steps=st.lists(SOME, max_size=60)
)
def test_bound_stays_between_its_ends(most: int, least: int, hold_steps: int, steps: list[dict[str, float]]) -> None:
    least = min(least, most)
    throttled = throttle(most, min_staleness=least, hold_steps=hold_steps, calm_steps=1, learning_rate=True)
    for figures in steps:
        before = throttled.max_staleness, throttled.lr_scale
        action = throttled.observe(figures)
        assert least <= throttled.max_staleness <= most
        assert 0.1 <= throttled.lr_scale <= 1
        assert (action is None) == (before == (throttled.max_staleness, throttled.lr_scale))


@settings(max_examples=100)
@given(
    ess=st.floats(0, 1), kl=st.floats(0, 0.3), masked=st.floats(0, 1), smoothing=st.floats(0, 0.95), cut=st.booleans()
)
def test_constant_metrics_do_not_oscillate_bound(
    ess: float, kl: float, masked: float, smoothing: float, cut: bool
) -> None:
    throttled = throttle(smoothing=smoothing, hold_steps=1, calm_steps=1)
    if cut:
        throttled.restore({**throttled.state(), "max_staleness": 3})
    figures = {"ess": ess, "kl_k3": kl, "masked_fraction": masked}
    directions = {action.direction for _ in range(30) if (action := throttled.observe(figures)) is not None}
    if 0.5 <= ess < 0.75 and kl <= 0.1 and masked <= 0.5:
        assert directions == set(), "inside the band nothing moves"
    assert len(directions) <= 1
