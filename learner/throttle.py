"""The throttle: lowers the staleness bound when the off-policy figures say so, and raises it again when they are calm.

Decrease by half, increase by one (as congestion control does), so that it backs off faster than it comes back.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slipstream.configs.schema.throttle import ThrottleConfig


@dataclass(frozen=True)
class Action:
    """What is to change, and why."""

    max_staleness: int
    """The effective bound from now on, in versions."""
    lr_scale: float
    """Factor of the learning rate from now on, at most 1."""
    cause: str
    """Such as `ess 0.31 < 0.5`."""
    direction: Literal["down", "up"]


@dataclass(frozen=True)
class Watch:
    """One figure and its limits."""

    figure: str
    limit: float
    calm: float
    """Beyond this, seen from the good side, it is not calm."""
    largest: bool
    """Whether the limits are the largest values; else they are the smallest."""

    def breached(self, value: float) -> bool:
        """Whether it is beyond its limit."""
        return value > self.limit if self.largest else value < self.limit

    def is_calm(self, value: float) -> bool:
        """Whether it is far enough from its limit."""
        return value <= self.calm if self.largest else value >= self.calm


class Throttle:
    """Sees the figures of each step, and says when the bound should move."""

    def __init__(self, config: ThrottleConfig, max_staleness: int) -> None:
        """`max_staleness` is the configured bound, at least `config.min_staleness`: the effective one starts there."""
        self._config = config
        self._most = max_staleness
        self._watched = _watched(config)
        self._averages: dict[str, float] = {}
        self._calm_steps = self._hold_steps = 0
        self.max_staleness = max_staleness
        """The effective bound."""
        self.lr_scale = 1.0
        """Factor of the learning rate."""

    def observe(self, figures: Mapping[str, float]) -> Action | None:
        """Takes a step's figures: `ess`, `kl_k3`, `masked_fraction`, `mismatch_abs`; others, and missing ones, are skipped.

        A figure that is no finite number is a breach, and does not enter its running average.
        """
        seen = [watch for watch in self._watched if watch.figure in figures]
        values = {watch.figure: self._averaged(watch.figure, figures[watch.figure]) for watch in seen}
        breaches = [_breach(watch, values[watch.figure]) for watch in seen if _is_breach(watch, values[watch.figure])]
        held, self._hold_steps = self._hold_steps > 0, max(0, self._hold_steps - 1)
        if breaches:
            self._calm_steps = 0
            return None if held else self._cut(", ".join(breaches))
        if not seen:
            return None
        self._calm_steps = self._calm_steps + 1 if all(watch.is_calm(values[watch.figure]) for watch in seen) else 0
        return self._rise() if self._calm_steps >= self._config.calm_steps else None

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps: always the same keys; NaN for the average of a figure that was not seen yet."""
        averages = {watch.figure: self._averages.get(watch.figure, math.nan) for watch in _watched(_EVERYTHING)}
        return {
            "max_staleness": self.max_staleness,
            "lr_scale": self.lr_scale,
            "calm_steps": self._calm_steps,
            "hold_steps": self._hold_steps,
            **averages,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Goes on from `state()`, within the bounds of the present configuration."""
        self.max_staleness = min(max(int(state["max_staleness"]), self._config.min_staleness), self._most)
        self.lr_scale = max(state["lr_scale"], self._config.min_lr_scale) if self._config.learning_rate else 1.0
        self._calm_steps, self._hold_steps = int(state["calm_steps"]), int(state["hold_steps"])
        known = {watch.figure: state[watch.figure] for watch in self._watched}
        self._averages = {figure: average for figure, average in known.items() if not math.isnan(average)}

    def _averaged(self, figure: str, value: float) -> float:
        """Its running average with this value in it; the value itself if it is no finite number."""
        if not math.isfinite(value):
            return value
        share = self._config.smoothing
        self._averages[figure] = share * self._averages.get(figure, value) + (1 - share) * value
        return self._averages[figure]

    def _cut(self, cause: str) -> Action | None:
        action = self._move(
            max(self._config.min_staleness, self.max_staleness // 2),
            max(self._config.min_lr_scale, self.lr_scale / 2),
            cause,
            "down",
        )
        if action is not None:
            self._hold_steps = self._config.hold_steps
        return action

    def _rise(self) -> Action | None:
        calm_steps, self._calm_steps = self._calm_steps, 0
        return self._move(
            min(self._most, self.max_staleness + 1), min(1.0, self.lr_scale * 2), f"calm for {calm_steps} steps", "up"
        )

    def _move(self, bound: int, lr_scale: float, cause: str, direction: Literal["down", "up"]) -> Action | None:
        """The action, None where nothing changes."""
        lr_scale = lr_scale if self._config.learning_rate else 1.0
        if (bound, lr_scale) == (self.max_staleness, self.lr_scale):
            return None
        self.max_staleness, self.lr_scale = bound, lr_scale
        return Action(bound, lr_scale, cause, direction)


_EVERYTHING = ThrottleConfig(max_mismatch=1.0)


def _watched(config: ThrottleConfig) -> list[Watch]:
    """The figures that the configuration limits."""
    largest = {
        "kl_k3": config.max_kl,
        "masked_fraction": config.max_masked,
        "mismatch_abs": config.max_mismatch,
    }
    watched = [
        Watch(figure, limit, config.relax * limit, largest=True)
        for figure, limit in largest.items()
        if limit is not None
    ]
    if config.min_ess is not None:
        watched.insert(0, Watch("ess", config.min_ess, 1 - config.relax * (1 - config.min_ess), largest=False))
    return watched


def _is_breach(watch: Watch, value: float) -> bool:
    return not math.isfinite(value) or watch.breached(value)


def _breach(watch: Watch, value: float) -> str:
    if not math.isfinite(value):
        return f"{watch.figure} {value}"
    return f"{watch.figure} {value:.3g} {'>' if watch.largest else '<'} {watch.limit:g}"
