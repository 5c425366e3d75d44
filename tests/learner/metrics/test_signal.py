"""Warnings of a training without a learning signal."""

from collections.abc import Mapping
from typing import Any

import pytest
import structlog

from slipstream.configs.schema.rollout import SamplingConfig
from slipstream.learner.metrics.signal import STEPS_IN_A_ROW, SignalWatch, has_fixed_length

SOUND = {"reward": 0.5, "reward_std": 0.4, "groups_without_spread": 0.5, "answers_cut_off": 0.1, "grad_norm": 1.0}
EQUAL = SOUND | {"reward": 0.0, "reward_std": 0.0, "groups_without_spread": 1.0, "grad_norm": 0.0}
NO_SPREAD = SOUND | {"groups_without_spread": 1.0, "grad_norm": 0.0}
CUT_OFF = SOUND | {"answers_cut_off": 1.0}
NO_GRADIENT = SOUND | {"grad_norm": 0.0}


def warnings(watch: SignalWatch, *steps: Mapping[str, float]) -> list[tuple[str, int]]:
    """Event and step of each warning."""
    with structlog.testing.capture_logs() as logs:
        for number, figures in enumerate(steps, start=1):
            watch.observe(number, figures)
    return [(line["event"], line["step"]) for line in logs]


@pytest.mark.parametrize(
    ("figures", "word"), [(EQUAL, "equal"), (NO_SPREAD, "spread"), (CUT_OFF, "cut off"), (NO_GRADIENT, "gradient")]
)
def test_finding_is_logged_once_until_it_ends(figures: Mapping[str, float], word: str) -> None:
    watch = SignalWatch(rewarded=True, group_relative=True, fixed_length=False)
    again = 2 * STEPS_IN_A_ROW + 2
    steps = [figures] * (STEPS_IN_A_ROW + 1) + [SOUND] + [figures] * STEPS_IN_A_ROW
    found = warnings(watch, *steps)
    assert [step for _, step in found] == [STEPS_IN_A_ROW, again]
    assert all(word in event for event, _ in found)


def test_sound_steps_log_nothing() -> None:
    mixed = [EQUAL, NO_SPREAD, CUT_OFF, NO_GRADIENT, SOUND] * STEPS_IN_A_ROW
    assert warnings(SignalWatch(rewarded=True, group_relative=True, fixed_length=False), *mixed) == []


def test_expected_findings_are_none() -> None:
    watch = SignalWatch(rewarded=True, group_relative=False, fixed_length=True)
    assert warnings(watch, *[NO_SPREAD | CUT_OFF] * STEPS_IN_A_ROW) == []
    distillation = SignalWatch(rewarded=False, group_relative=False, fixed_length=False)
    assert warnings(distillation, *[EQUAL] * STEPS_IN_A_ROW) == []


@pytest.mark.parametrize(
    ("sampling", "fixed"),
    [({"max_tokens": 1}, True), ({"max_tokens": 8, "ignore_eos": True}, True), ({"max_tokens": 2}, False)],
)
def test_answers_of_fixed_length(sampling: Mapping[str, Any], fixed: bool) -> None:
    assert has_fixed_length(SamplingConfig(**sampling)) is fixed
