"""The off-policy correction: what anchors the trust region, and what pays for the staleness."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from slipstream.configs.schema.base import Section


class RejectionConfig(Section):
    """Actions or whole answers whose π_prox/μ is out of bounds are left out of the loss and of its mean."""

    level: Literal["token", "sequence_mean", "sequence_sum", "sequence_max"]
    """What is judged: each action by itself, or the answer by the mean or the sum of its actions' estimates, or by each
    of them (`sequence_max`: one that is out of bounds is enough). `sequence_mean` of `k1` is the geometric mean of the
    ratios, `sequence_sum` their product."""
    estimator: Literal["k1", "k2", "k3"]
    """`k1` bounds the ratio itself (below and above); `k2` and `k3` estimate KL(μ‖π_prox), in nats (above only)."""
    low: float | None = Field(default=None, ge=0)
    """Smallest ratio; of `k1` only, where it is 1/high if unset."""
    high: float = Field(gt=0)
    """Largest ratio, or largest estimate."""

    @property
    def name(self) -> str:
        """The reason by which what it leaves out is counted."""
        return f"{self.level}_{self.estimator}"

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.estimator != "k1" and self.low is not None:
            raise ValueError(f"low is for the estimator k1; {self.estimator} is never negative and has only high")
        if self.low is not None and self.low >= self.high:
            raise ValueError(f"low={self.low:g} must be less than high={self.high:g}")
        if self.estimator == "k1" and self.low is None and self.high <= 1:
            raise ValueError(f"high={self.high:g} must be more than 1, unless low is given: it is 1/high otherwise")
        return self


class CorrectionConfig(Section):
    """Three policies are kept apart: behaviour μ (which generated), proximal (the anchor), target (being optimised)."""

    proximal: Literal["recompute", "interpolate", "behaviour"] = "recompute"
    """The anchor of the trust region: the weights before the step's first update (one more forward pass where a step
    has several updates), a log-linear interpolation between μ and the target by their versions (no forward pass; as
    AReaL's `prox_logp_method: loglinear`), or μ itself (PPO as it was; there is no behaviour weight then)."""
    weight: Literal["none", "token", "sequence"] = "token"
    """The behaviour weight π_prox/μ that multiplies the loss: none, each action's, or the product over the answer.
    `none` if unset where `proximal` is `behaviour`."""
    cap: float | None = Field(default=2.0, gt=0)
    """Larger weights are cut down to this (truncated importance sampling, arXiv 1802.01561); null: no cap. Unset it is
    null where there is a `band` or no weight."""
    band: tuple[float, float] | None = None
    """[low, high]: weights outside become 0 (IcePop), in place of `cap`; unset: none do."""
    normalise: bool = False
    """Divide the weights by their mean over what is trained on in the step, so that their mean is 1."""
    rejections: tuple[RejectionConfig, ...] = ()
    """What is left out altogether."""
    second_moment: float | None = Field(default=None, gt=0)
    """M2PO (arXiv 2510.01161): actions with the largest squared log ratio are left out until its mean over the step is
    at most this (the paper's value: 0.04); unset: none are."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """An answer with an action whose π_prox/μ is below this (such as 1e-4) is left out as a whole; unset: none is."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """Defaults that depend on other keys; so a configuration that was written out reads back the same."""
        if not isinstance(given, Mapping):
            return given
        full = dict(given)
        if full.get("proximal") == "behaviour":
            full.setdefault("weight", "none")
        if full.get("weight") == "none" or full.get("band") is not None:
            full.setdefault("cap", None)
        return full

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.band is not None and not 0 <= self.band[0] < self.band[1]:
            problems.append(f"band={list(self.band)} must be two numbers, 0 <= low < high")
        if self.band is not None and self.cap is not None:
            problems.append("cap and band exclude each other; give one")
        if self.weight == "none" and (asked := self._given("cap", "band", "normalise")):
            problems.append(f"weight: none leaves nothing for {asked} to act on")
        if self.proximal == "interpolate" and self.needs_proximal_first:
            problems.append(
                "proximal: interpolate saves the forward pass that normalise, rejections, second_moment and veto need"
            )
        if self.proximal == "behaviour":
            asked = "weight, " if self.weight != "none" else ""
            asked += self._given("rejections", "second_moment", "veto")
            if asked:
                problems.append(
                    f"proximal: behaviour has π_prox/μ = 1 everywhere, so {asked.removesuffix(', ')} can't do anything"
                )
        problems += [
            f"rejections has {name} {count} times; give one, with the narrower bounds"
            for name, count in Counter(rule.name for rule in self.rejections).items()
            if count > 1
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _given(self, *keys: str) -> str:
        return ", ".join(key for key in keys if getattr(self, key))

    @property
    def reasons(self) -> list[str]:
        """By what actions may be left out."""
        others = {"veto": self.veto, "second_moment": self.second_moment}
        return [rule.name for rule in self.rejections] + [name for name, value in others.items() if value is not None]

    @property
    def needs_proximal_first(self) -> bool:
        """Whether the whole step's π_prox must be known before the first update's loss."""
        return bool(self.normalise or self.rejections or self.second_moment or self.veto)
