"""Warnings of a training that has nothing to learn from, with the likely cause."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.rollout import SamplingConfig

log = get_log("learner.signal")

STEPS_IN_A_ROW = 20
"""Steps with the same finding before it is logged: small steps have one by chance."""

Metrics = Mapping[str, float]


def has_fixed_length(sampling: SamplingConfig) -> bool:
    """True if every answer goes on to the token limit by intention."""
    return sampling.ignore_eos or sampling.max_tokens == 1  # one token and the end would be two


@dataclass
class SignalWatch:
    """Logs each finding once, when it holds for `STEPS_IN_A_ROW` steps, and again only after a step without it."""

    rewarded: bool
    """True if rewards are trained on."""
    group_relative: bool
    """True if all advantages compare the episodes of a group: then groups of equal rewards train nothing."""
    fixed_length: bool
    """True if all answers have the same length by configuration (`has_fixed_length`)."""
    _in_a_row: dict[str, int] = field(default_factory=dict, init=False)

    @property
    def _expected(self) -> set[str]:
        """Findings that are none with these settings."""
        sought = {_ALL_EQUAL: self.rewarded, _NO_SPREAD: self.group_relative, _CUT_OFF: not self.fixed_length}
        return {event for event, is_sought in sought.items() if not is_sought}

    def observe(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of a step."""
        for event, holds, remedy in _FINDINGS:
            fires = holds(metrics) and event not in self._expected
            self._in_a_row[event] = self._in_a_row.get(event, 0) + 1 if fires else 0
            if self._in_a_row[event] == STEPS_IN_A_ROW:
                shown = {name: metrics[name] for name in _SHOWN if name in metrics}
                log.warning(event, step=step, steps=STEPS_IN_A_ROW, **shown, remedy=remedy)


_SHOWN = ("reward", "reward_std", "answer_tokens", "answers_cut_off", "grad_norm")
_ALL_EQUAL = "all rewards are equal"
_NO_SPREAD = "no group has a spread of rewards"
_CUT_OFF = "all answers are cut off"


def _all_equal(metrics: Metrics) -> bool:
    return metrics["reward_std"] == 0


def _no_spread(metrics: Metrics) -> bool:
    return metrics["groups_without_spread"] == 1 and not _all_equal(metrics)


def _all_cut_off(metrics: Metrics) -> bool:
    return metrics["answers_cut_off"] == 1


def _no_gradient(metrics: Metrics) -> bool:
    return metrics.get("grad_norm") == 0 and not (_all_equal(metrics) or _no_spread(metrics))


_FINDINGS: tuple[tuple[str, Callable[[Metrics], bool], str], ...] = (
    (
        _ALL_EQUAL,
        _all_equal,
        "read some answers: the reward may not recognise right ones, or the tasks are too hard, or all are solved",
    ),
    (
        _NO_SPREAD,
        _no_spread,
        "each task is solved always or never: raise rollout.group_size or rollout.sampling.temperature, or take tasks "
        "of medium difficulty",
    ),
    (
        _CUT_OFF,
        _all_cut_off,
        "raise rollout.sampling.max_tokens, or see that the prompt lets the model end its answer",
    ),
    (
        "the gradient is 0 though rewards differ",
        _no_gradient,
        "every action is clipped, masked or weighted to 0: see clip_fraction, masked_fraction and learner.correction",
    ),
)
