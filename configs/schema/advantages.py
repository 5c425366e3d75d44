"""Which advantages the learner computes, and their settings."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, Tag

from slipstream.configs.schema.named import NAME_ALONE, PLUGIN, NamedSection, PluginSection, by_name


class GrpoConfig(NamedSection):
    """Rewards relative to the group, in units of its spread (arXiv 2402.03300)."""

    name: Literal["grpo"] = "grpo"
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class DrGrpoConfig(NamedSection):
    """Rewards relative to the group's mean, not scaled (arXiv 2503.20783)."""

    name: Literal["dr_grpo"]


class PassKConfig(NamedSection):
    """Only the group's best answer counts, by its lead over the second (arXiv 2503.19595)."""

    name: Literal["grpo_passk"]
    divide_by_std: bool = False
    """Scale by the spread of the group's rewards."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class GdpoConfig(NamedSection):
    """Each reward term is scaled within the group by itself, then they are added up (arXiv 2601.05242)."""

    name: Literal["gdpo"]
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviations."""


class RlooConfig(NamedSection):
    """Rewards relative to the mean of the group's other answers (arXiv 2402.14740)."""

    name: Literal["rloo"]


class OpoConfig(NamedSection):
    """Rewards relative to the group's mean weighted by length (arXiv 2505.23585)."""

    name: Literal["opo"]


class RemaxConfig(NamedSection):
    """Rewards relative to the reward of a greedy answer to the same task (arXiv 2310.10505)."""

    name: Literal["remax"]


class ReinforcePlusPlusConfig(NamedSection):
    """Discounted rewards to go, whitened over the batch (arXiv 2501.03262)."""

    name: Literal["reinforce_plus_plus"]
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""


class ReinforcePlusPlusBaselineConfig(NamedSection):
    """Rewards relative to the group's mean, whitened over the batch (arXiv 2501.03262)."""

    name: Literal["reinforce_plus_plus_baseline"]


class GpgConfig(NamedSection):
    """Rewards relative to the group's mean, scaled up for the answers that teach nothing (arXiv 2504.02546)."""

    name: Literal["gpg"]
    scale_up_for: Literal["no_advantage", "no_reward"] = "no_advantage"
    """Answers that the others are scaled up for: those of groups without any spread, as in the paper, or those whose
    reward is 0, as verl 0.9.1 counts them."""


class GaeConfig(NamedSection):
    """Generalised advantage estimation with a critic (arXiv 1506.02438), whitened over the batch."""

    name: Literal["gae"]
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token, of policy and critic."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of the policy's advantages; the critic's is `learner.critic.lam` (VAPO's decoupling)."""
    length_adaptive: float | None = Field(default=None, gt=0)
    """a of VAPO's λ = 1 - 1/(a · answer length), in place of `lam` (arXiv 2504.05118: 0.05); unset: off."""


class OptimalTokenBaselineConfig(NamedSection):
    """Rewards to go relative to the baseline that minimises the gradient's variance at each token."""

    name: Literal["optimal_token_baseline"]
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the sum of the weights."""


BUILT_IN_ADVANTAGES: Final = (
    "grpo", "dr_grpo", "grpo_passk", "gdpo", "rloo", "opo", "remax", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "gpg", "gae", "optimal_token_baseline",
)  # fmt: skip

GROUP_RELATIVE: Final = frozenset(
    {
        "grpo", "dr_grpo", "grpo_passk", "gdpo", "rloo", "opo", "reinforce_plus_plus_baseline", "gpg",
        "optimal_token_baseline",
    }
)  # fmt: skip
"""Advantages that compare the answers of a group, so that it needs two."""


class AdvantagePlugin(PluginSection):
    """Advantages of the user's own: `(AdvantageInputs, **options) -> [B, T]`, see learner/advantages."""

    kind: ClassVar[str] = "advantage"
    built_in: ClassVar[tuple[str, ...]] = BUILT_IN_ADVANTAGES


AdvantageConfig = Annotated[
    Annotated[GrpoConfig, Tag("grpo")]
    | Annotated[DrGrpoConfig, Tag("dr_grpo")]
    | Annotated[PassKConfig, Tag("grpo_passk")]
    | Annotated[GdpoConfig, Tag("gdpo")]
    | Annotated[RlooConfig, Tag("rloo")]
    | Annotated[OpoConfig, Tag("opo")]
    | Annotated[RemaxConfig, Tag("remax")]
    | Annotated[ReinforcePlusPlusConfig, Tag("reinforce_plus_plus")]
    | Annotated[ReinforcePlusPlusBaselineConfig, Tag("reinforce_plus_plus_baseline")]
    | Annotated[GpgConfig, Tag("gpg")]
    | Annotated[GaeConfig, Tag("gae")]
    | Annotated[OptimalTokenBaselineConfig, Tag("optimal_token_baseline")]
    | Annotated[AdvantagePlugin, Tag(PLUGIN)],
    by_name(*BUILT_IN_ADVANTAGES),
    NAME_ALONE,
]
