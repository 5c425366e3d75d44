"""The throttle: lowers the staleness bound when off-policy metrics exceed limits, and raises it when they recover.

It halves the bound and raises it by one, as congestion control does: it backs off faster than it recovers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from slipstream.configs.schema.learner import ThrottleConfig

METRICS: Final = ("ess", "kl_k3", "masked_fraction", "mismatch_abs")
"""Metrics that can be limited."""
RELAX: Final = 0.5
"""Hysteresis: a metric is calm up to this share of its limit; for the sample size, of 1 - limit."""
MIN_LR_SCALE: Final = 0.1
"""Smallest factor of the learning rate."""
SMOOTHING: Final = 0.8
CALM_STEPS: Final = 10


@dataclass(frozen=True)
class Action:
    """A change of the bound, and its cause."""

    max_staleness: int
    """The new effective bound, in versions."""
    lr_scale: float
    """The new factor of the learning rate, at most 1."""
    cause: str
    """Such as `ess 0.31 < 0.5`."""
    direction: Literal["down", "up"]


@dataclass(frozen=True)
class Watch:
    """Limits of one metric: upper ones, or lower ones where `smallest` is set."""

    metric: str
    limit: float
    calm: float
    smallest: bool = False

    def breach(self, value: float) -> str | None:
        """Description of a value that is beyond the limit or not finite; None for others."""
        if not math.isfinite(value):
            return f"{self.metric} {value}"
        if value < self.limit if self.smallest else value > self.limit:
            return f"{self.metric} {value:.3g} {'<' if self.smallest else '>'} {self.limit:g}"
        return None

    def is_calm(self, value: float) -> bool:
        """True if a value is far from the limit."""
        return value >= self.calm if self.smallest else value <= self.calm


class Throttle:
    """Controller of the staleness bound, and optionally of the learning rate."""

    def __init__(
        self,
        config: ThrottleConfig,
        max_staleness: int,
        *,
        smoothing: float = SMOOTHING,
        calm_steps: int = CALM_STEPS,
    ) -> None:
        """The bound starts at the configured `max_staleness`, which is at least `config.min_staleness`.

        Args:
            smoothing: weight of the past in the metrics' running averages.
            calm_steps: steps within half of the limits before the bound rises.
        """
        self._config = config
        self._most = max_staleness
        self._watched = _watched(config)
        self._smoothing, self._rises_after = smoothing, calm_steps
        self._averages: dict[str, float] = {}
        self._calm_steps = self._hold_steps = 0
        self.max_staleness = max_staleness
        """The effective bound."""
        self.lr_scale = 1.0
        """Factor of the learning rate."""

    def observe(self, metrics: Mapping[str, float]) -> Action | None:
        """Observes a step's metrics; missing ones are skipped. Returns the change to apply, if any.

        A value that is not finite is a breach, and does not enter its running average.
        """
        values = [(watch, self._averaged(watch.metric, metrics)) for watch in self._watched if watch.metric in metrics]
        breaches = [breach for watch, value in values if (breach := watch.breach(value))]
        held, self._hold_steps = self._hold_steps > 0, max(0, self._hold_steps - 1)
        if breaches:
            self._calm_steps = 0
            return None if held else self._cut(", ".join(breaches))
        if values:
            self._calm_steps = self._calm_steps + 1 if all(watch.is_calm(value) for watch, value in values) else 0
        return self._rise() if self._calm_steps >= self._rises_after else None

    def state(self) -> dict[str, float]:
        """State for a checkpoint: always the same keys; NaN is the average of a metric not observed yet."""
        return {
            "max_staleness": self.max_staleness,
            "lr_scale": self.lr_scale,
            "calm_steps": self._calm_steps,
            "hold_steps": self._hold_steps,
            **{metric: self._averages.get(metric, math.nan) for metric in METRICS},
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Restores a `state()`, within the bounds of the present configuration."""
        self.max_staleness = min(max(int(state["max_staleness"]), self._config.min_staleness), self._most)
        self.lr_scale = max(state["lr_scale"], MIN_LR_SCALE) if self._config.learning_rate else 1.0
        self._calm_steps, self._hold_steps = int(state["calm_steps"]), int(state["hold_steps"])
        self._averages = {metric: state[metric] for metric in METRICS if not math.isnan(state[metric])}

    def _averaged(self, metric: str, metrics: Mapping[str, float]) -> float:
        value = metrics[metric]
        if not math.isfinite(value):
            return value
        before = self._averages.get(metric, value)
        self._averages[metric] = before + (1 - self._smoothing) * (value - before)
        return self._averages[metric]

    def _cut(self, cause: str) -> Action | None:
        bound = max(self._config.min_staleness, self.max_staleness // 2)
        action = self._move(bound, max(MIN_LR_SCALE, self.lr_scale / 2), cause, "down")
        if action is not None:
            self._hold_steps = self._config.hold_steps
        return action

    def _rise(self) -> Action | None:
        cause, self._calm_steps = f"calm for {self._calm_steps} steps", 0
        return self._move(min(self._most, self.max_staleness + 1), min(1.0, self.lr_scale * 2), cause, "up")

    def _move(self, bound: int, lr_scale: float, cause: str, direction: Literal["down", "up"]) -> Action | None:
        """The action; None if it changes nothing."""
        lr_scale = lr_scale if self._config.learning_rate else 1.0
        if (bound, lr_scale) == (self.max_staleness, self.lr_scale):
            return None
        self.max_staleness, self.lr_scale = bound, lr_scale
        return Action(bound, lr_scale, cause, direction)


def _watched(config: ThrottleConfig) -> list[Watch]:
    """Metrics that the configuration limits."""
    watched = []
    if config.min_ess is not None:
        watched.append(Watch("ess", config.min_ess, 1 - RELAX * (1 - config.min_ess), smallest=True))
    largest = {"kl_k3": config.max_kl, "masked_fraction": config.max_masked, "mismatch_abs": config.max_mismatch}
    watched += [Watch(metric, limit, RELAX * limit) for metric, limit in largest.items() if limit is not None]
    return watched
