"""Advantages and policy losses of the learner, and their settings."""

from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, Tag, model_validator

from slipstream.configs.schema.base import NAME_ALONE, PLUGIN, NamedSection, PluginSection, by_name


class GrpoConfig(NamedSection):
    """(r - mean) / (std + epsilon) of the group's rewards r, sample std (arXiv 2402.03300)."""

    name: Literal["grpo"] = "grpo"
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class DrGrpoConfig(NamedSection):
    """r - mean of the group's rewards r (arXiv 2503.20783)."""

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
    """r - mean of the rewards of the group's other answers (arXiv 2402.14740)."""

    name: Literal["rloo"]


class OpoConfig(NamedSection):
    """r - the group's mean weighted by length (arXiv 2505.23585)."""

    name: Literal["opo"]


class RemaxConfig(NamedSection):
    """r - reward of a greedy answer to the same task (arXiv 2310.10505)."""

    name: Literal["remax"]


class ReinforcePlusPlusConfig(NamedSection):
    """Discounted rewards to go, whitened over the batch (arXiv 2501.03262)."""

    name: Literal["reinforce_plus_plus"]
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""


class ReinforcePlusPlusBaselineConfig(NamedSection):
    """r - mean of the group, whitened over the batch (arXiv 2501.03262)."""

    name: Literal["reinforce_plus_plus_baseline"]


class GpgConfig(NamedSection):
    """(r - mean) · answers / answers with a gradient (arXiv 2504.02546)."""

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
    """Rewards to go minus the baseline of least gradient variance at each token (arXiv 2602.07078)."""

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
    """Advantages of the user's own: `(AdvantageInputs, **options) -> [B, T]`, see learner/algorithms/advantages."""

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


Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "constant"
]


class LossSection(NamedSection):
    """Keys of all policy losses."""

    shared: ClassVar[frozenset[str]] = frozenset({"name", "aggregation", "constant", "entropy_bonus"})

    aggregation: Aggregation = "token-mean"
    """Reduction of the tokens' losses to one number, over the whole update on all ranks: mean or sum over tokens; mean
    over sequences of their token sums, of their token means, or of their token sums / `rollout.sampling.max_tokens`;
    or the token sum / `constant`."""
    constant: float | None = Field(default=None, gt=0)
    """Of `aggregation: constant`: divisor of the sum over all tokens of an update."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Coefficient of the policy's entropy, which is added to the objective; 0 saves its computation."""


class RatioClip(LossSection):
    """The ratio to the proximal policy is kept in a range."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio's lower bound is 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio's upper bound is 1 + clip_high; above clip_low it is DAPO's clip-higher (arXiv 2503.14476)."""


class DualClip(RatioClip):
    """The clipped surrogate, and a bound of what bad actions may lose."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the loss of bad actions, in units of |advantage| (arXiv 1912.09729); unset: none."""


class PpoConfig(DualClip):
    """-min(ratio · A, clip(ratio) · A), ratio = π_θ/π_prox (arXiv 1707.06347)."""

    name: Literal["ppo"] = "ppo"


class DecoupledPpoConfig(DualClip):
    """`ppo` that requires a proximal policy and an importance weight (arXiv 2110.00641)."""

    name: Literal["decoupled_ppo"]


class GspoConfig(RatioClip):
    """`ppo` with one ratio for the whole answer, the geometric mean of its tokens' (arXiv 2507.18071)."""

    name: Literal["gspo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """As for every loss; the paper's is the default."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """The sequence ratio's lower bound is 1 - clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """The sequence ratio's upper bound is 1 + clip_high."""


class CispoConfig(RatioClip):
    """-clip(ratio) · A · log π_θ with a constant clip(ratio): no token loses its gradient (arXiv 2506.13585)."""

    name: Literal["cispo"]


class GmpoConfig(LossSection):
    """Geometric mean of the tokens' clipped ratios (arXiv 2507.20673)."""

    name: Literal["gmpo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """As for every loss; the paper's is the default."""
    clip_low: float = Field(default=0.4, ge=0)
    """Lower bound of a token's log ratio, as a positive number."""
    clip_high: float = Field(default=0.4, ge=0)
    """Upper bound of a token's log ratio."""


class SapoConfig(LossSection):
    """A sigmoid gate in place of the clip (arXiv 2511.20347)."""

    name: Literal["sapo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """As for every loss; the paper's is the default."""
    tau_positive: float = Field(default=1.0, gt=0)
    """Steepness of the gate where the advantage is positive."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Steepness of the gate where it is not."""


class DivergenceClip(LossSection):
    """A token loses its gradient where that would take it out of a region of divergence.

    The paper's region is around the behaviour policy, which is `learner.correction.proximal: behaviour`.
    """

    clip_low: float = Field(default=0.1, ge=0)
    """Largest divergence of tokens that get less likely."""
    clip_high: float = Field(default=0.1, ge=0)
    """Largest divergence of tokens that get likelier."""
    cap: float = Field(default=20.0, gt=0)
    """Cap of the ratio to the proximal policy, which weighs the log-prob; a low one biases."""


class DppoTvConfig(DivergenceClip):
    """The trust region is a bound of the total variation at each token (arXiv 2602.04879)."""

    name: Literal["dppo_tv"]


class DppoKlConfig(DivergenceClip):
    """The trust region is a bound of the binary KL divergence at each token (arXiv 2602.04879)."""

    name: Literal["dppo_kl"]
    clip_low: float = Field(default=0.05, ge=0)
    """Largest divergence of tokens that get less likely, in nats."""
    clip_high: float = Field(default=0.05, ge=0)
    """Largest divergence of tokens that get likelier, in nats."""


class DroConfig(LossSection):
    """Policy gradient with a quadratic penalty on each token's log ratio (arXiv 2405.19107)."""

    name: Literal["dro"]
    beta: float = Field(default=0.5, gt=0)
    """Weight of the penalty."""


class ClipCovConfig(RatioClip):
    """PPO that takes the gradient from a few random tokens with a high covariance (arXiv 2505.22617)."""

    name: Literal["clip_cov"]
    ratio: float = Field(default=2e-4, gt=0, le=1)
    """Share of a micro-batch's tokens that lose their gradient, at least one."""
    cov_low: float = 1.0
    """Only tokens whose covariance of log-prob and advantage is above this are chosen."""
    cov_high: float = 5.0
    """And below this."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low={self.cov_low:g} must be less than cov_high={self.cov_high:g}")
        return self


class KlCovConfig(LossSection):
    """Policy gradient with a KL penalty on the tokens of the highest covariance (arXiv 2505.22617)."""

    name: Literal["kl_cov"]
    ratio: float = Field(default=2e-4, gt=0, le=1)
    """Share of a micro-batch's tokens that are penalised, at least one."""
    coefficient: float = Field(default=1.0, ge=0)
    """Weight of the penalty |log ratio|."""


class ReinforceConfig(LossSection):
    """-A · log π, without any ratio (Williams 1992)."""

    name: Literal["reinforce"]


class ToprConfig(LossSection):
    """Good answers count fully, bad ones by their truncated sequence ratio (arXiv 2503.14286)."""

    name: Literal["topr"]
    cap: float = Field(default=1.0, gt=0)
    """Cap of the bad answers' ratio π_θ/μ."""


class KimiConfig(LossSection):
    """Policy gradient with the square of the answer's log ratio as its regulariser (arXiv 2501.12599)."""

    name: Literal["kimi"]
    aggregation: Aggregation = "seq-mean-token-sum"
    """As for every loss; the paper's is the default."""
    tau: float = Field(default=0.1, gt=0)
    """Weight of the regulariser."""


REGULARISED: Final = frozenset({"dro", "kl_cov", "kimi"})
"""Policy gradients but for a term in log π_θ - log π_prox."""

BUILT_IN_LOSSES: Final = (
    "ppo", "decoupled_ppo", "gspo", "cispo", "gmpo", "sapo", "dppo_tv", "dppo_kl", "dro", "clip_cov", "kl_cov",
    "reinforce", "topr", "kimi",
)  # fmt: skip


class LossPlugin(PluginSection, LossSection):
    """A loss of the user's own: `(LossInputs, **options) -> LossTerms`, see learner/algorithms/losses."""

    kind: ClassVar[str] = "loss"
    built_in: ClassVar[tuple[str, ...]] = BUILT_IN_LOSSES


LossConfig = Annotated[
    Annotated[PpoConfig, Tag("ppo")]
    | Annotated[DecoupledPpoConfig, Tag("decoupled_ppo")]
    | Annotated[GspoConfig, Tag("gspo")]
    | Annotated[CispoConfig, Tag("cispo")]
    | Annotated[GmpoConfig, Tag("gmpo")]
    | Annotated[SapoConfig, Tag("sapo")]
    | Annotated[DppoTvConfig, Tag("dppo_tv")]
    | Annotated[DppoKlConfig, Tag("dppo_kl")]
    | Annotated[DroConfig, Tag("dro")]
    | Annotated[ClipCovConfig, Tag("clip_cov")]
    | Annotated[KlCovConfig, Tag("kl_cov")]
    | Annotated[ReinforceConfig, Tag("reinforce")]
    | Annotated[ToprConfig, Tag("topr")]
    | Annotated[KimiConfig, Tag("kimi")]
    | Annotated[LossPlugin, Tag(PLUGIN)],
    by_name(*BUILT_IN_LOSSES),
    NAME_ALONE,
]
