"""The throttle: how much staleness the training can bear right now."""

from typing import Self

from pydantic import Field, model_validator

from slipstream.configs.schema.base import Section


class ThrottleConfig(Section):
    """Watches the off-policy figures, and moves the effective `buffer.max_staleness` between `min_staleness` and it.

    One figure beyond its limit halves the staleness; all of them on the good side of `relax` · limit, for `calm_steps`
    steps in a row, raise it by one. In between nothing moves.
    """

    min_ess: float | None = Field(default=0.5, gt=0, lt=1)
    """Smallest effective sample size, as a share of the actions; unset: not watched."""
    max_kl: float | None = Field(default=0.1, gt=0)
    """Largest KL(μ‖π_θ) per action (k3), in nats; unset: not watched."""
    max_masked: float | None = Field(default=0.5, gt=0, le=1)
    """Largest share of the actions that the correction leaves out; unset: not watched."""
    max_mismatch: float | None = Field(default=None, gt=0)
    """Largest mean |Δ log-prob| between engine and learner at the same weights; unset: not watched."""
    relax: float = Field(default=0.5, gt=0, lt=1)
    """Hysteresis: a figure counts as calm up to this share of its limit. Of the sample size the missing share counts:
    with 0.5 and `min_ess: 0.5` it is calm from 0.75."""
    smoothing: float = Field(default=0.8, ge=0, lt=1)
    """Share of the past in the figures' running averages."""
    calm_steps: int = Field(default=10, ge=1)
    """Calm steps before the staleness may rise."""
    hold_steps: int = Field(default=5, ge=0)
    """Steps after a cut in which nothing else is cut: what is in the buffer has to be used up first."""
    min_staleness: int = Field(default=0, ge=0)
    """The effective bound is never less."""
    learning_rate: bool = False
    """Also halve the learning rate with each cut, and double it (up to its schedule) with each rise."""
    min_lr_scale: float = Field(default=0.1, gt=0, le=1)
    """Of `learning_rate`: smallest factor."""

    @model_validator(mode="after")
    def _watches(self) -> Self:
        if self.min_ess is None and self.max_kl is None and self.max_masked is None and self.max_mismatch is None:
            raise ValueError("give at least one of min_ess, max_kl, max_masked and max_mismatch")
        return self
