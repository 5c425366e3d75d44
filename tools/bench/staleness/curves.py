"""What a run shows, step by step, and the three figures that it is judged by."""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

WINDOW: Final = 10
"""Versions whose rewards are averaged: one version's 256 fresh answers alone are a noisy figure."""


@dataclass
class Curves:
    """One run."""

    rewards: list[float] = field(default_factory=list)
    """Mean reward of fresh answers before each step, and after the last."""
    lags: list[int] = field(default_factory=list)
    """Lag that was in force at each step: a throttle may lower it."""
    figures: dict[str, list[float]] = field(default_factory=dict)
    """The learner's own, of each step."""
    dropped: int = 0
    """Groups that a falling lag has cost."""
    seconds: float = 0.0

    @property
    def halfway(self) -> float:
        """Reward after half of the steps."""
        middle = len(self.rewards) // 2
        return fmean(self.rewards[max(0, middle - WINDOW + 1) : middle + 1])

    @property
    def end(self) -> float:
        """Reward after the last step."""
        return fmean(self.rewards[-WINDOW:])

    @property
    def area(self) -> float:
        """Area under the reward's curve, as a share of what a reward of 1 throughout would have."""
        return fmean(self.rewards)
