"""The penalty on the divergence from a reference policy."""

from typing import Literal, Self

from pydantic import Field, model_validator

from slipstream.configs.schema.base import Section, UserPath

KlEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]


class KlConfig(Section):
    """KL(π_θ‖π_ref), to a frozen model that is sharded like the policy."""

    coefficient: float = Field(gt=0)
    """Weight of the penalty; with `target` the first one."""
    estimator: KlEstimator = "k3"
    """Per action, of δ = log π_θ - log π_ref: δ, δ²/2, e^-δ - 1 + δ, |δ|. With `+`: that value, but the gradient of k2,
    which is the unbiased one."""
    place: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken off the reward of each token (by π_prox then, without gradient)."""
    target: float | None = Field(default=None, gt=0)
    """KL per action that an adaptive coefficient steers to (arXiv 1909.08593, section 2.2); unset: it is fixed."""
    horizon: int = Field(default=10_000, ge=1)
    """Of `target`: answers in which a KL that is off by 20 % or more changes the coefficient by a fifth, about."""
    reference: UserPath | None = None
    """Folder of the reference model, which has the policy's tokens; unset: the policy's initial weights."""

    @model_validator(mode="after")
    def _gradient(self) -> Self:
        if self.place == "reward" and self.estimator.endswith("+"):
            raise ValueError(f"estimator {self.estimator!r} is for place: loss; a reward has no gradient")
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator 'k1' is for place: reward; its gradient knows nothing of the reference: take k1+, k2 or k3"
            )
        return self
