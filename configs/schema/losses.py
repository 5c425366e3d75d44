"""Policy losses of the learner, and their settings.

A new one takes two edits: its section here, listed in the tuple, and the function that `target` names.
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from slipstream.configs.registry import Registry
from slipstream.configs.schema.base import NamedSection, PluginSection, one_of, registry_of

_FOLDER: Final = "slipstream.learner.algorithms.losses."
_CLIPPED, _SELECTIVE = _FOLDER + "clipped:", _FOLDER + "selective:"


Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "constant"
]


class LossSection(NamedSection):
    """Keys of all policy losses."""

    shared: ClassVar[frozenset[str]] = frozenset({"name", "aggregation", "constant", "entropy_bonus", "top_entropy"})
    regularised: ClassVar[bool] = False
    """True for policy gradients but for a term in log π_θ - log π_prox."""
    weighted: ClassVar[bool] = False
    """True for losses that correct for staleness themselves, so that an importance weight would do so twice."""

    aggregation: Aggregation = "token-mean"
    """Reduction of the tokens' losses to one number, over the whole update on all ranks: mean or sum over tokens; mean
    over sequences of their token sums, of their token means, or of their token sums / `rollout.sampling.max_tokens`;
    or the token sum / `constant`."""
    constant: float | None = Field(default=None, gt=0)
    """Of `aggregation: constant`: divisor of the sum over all tokens of an update."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Coefficient of the policy's entropy, which is added to the objective; 0 saves its computation."""
    top_entropy: float | None = Field(default=None, gt=0, lt=1)
    """Share of a micro-batch's tokens, those of the highest entropy, that alone have a policy loss (arXiv 2506.01939:
    0.2); unset: all."""


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

    target: ClassVar[str] = _CLIPPED + "ppo"
    name: Literal["ppo"] = "ppo"


class DecoupledPpoConfig(DualClip):
    """`ppo` that requires a proximal policy and an importance weight (arXiv 2110.00641)."""

    target: ClassVar[str] = _CLIPPED + "ppo"
    name: Literal["decoupled_ppo"]


class GspoConfig(RatioClip):
    """`ppo` with one ratio for the whole answer, the geometric mean of its tokens' (arXiv 2507.18071)."""

    target: ClassVar[str] = _CLIPPED + "gspo"
    name: Literal["gspo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """As for every loss; the paper's is the default."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """The sequence ratio's lower bound is 1 - clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """The sequence ratio's upper bound is 1 + clip_high."""


class CispoConfig(RatioClip):
    """-clip(ratio) · A · log π_θ with a constant clip(ratio): no token loses its gradient (arXiv 2506.13585)."""

    target: ClassVar[str] = _CLIPPED + "cispo"
    name: Literal["cispo"]


class GmpoConfig(LossSection):
    """Geometric mean of the tokens' clipped ratios (arXiv 2507.20673)."""

    target: ClassVar[str] = _CLIPPED + "gmpo"
    name: Literal["gmpo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """As for every loss; the paper's is the default."""
    clip_low: float = Field(default=0.4, ge=0)
    """Lower bound of a token's log ratio, as a positive number."""
    clip_high: float = Field(default=0.4, ge=0)
    """Upper bound of a token's log ratio."""


class SapoConfig(LossSection):
    """A sigmoid gate in place of the clip (arXiv 2511.20347)."""

    target: ClassVar[str] = _CLIPPED + "sapo"
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

    target: ClassVar[str] = _SELECTIVE + "dppo_tv"
    name: Literal["dppo_tv"]


class DppoKlConfig(DivergenceClip):
    """The trust region is a bound of the binary KL divergence at each token (arXiv 2602.04879)."""

    target: ClassVar[str] = _SELECTIVE + "dppo_kl"
    name: Literal["dppo_kl"]
    clip_low: float = Field(default=0.05, ge=0)
    """Largest divergence of tokens that get less likely, in nats."""
    clip_high: float = Field(default=0.05, ge=0)
    """Largest divergence of tokens that get likelier, in nats."""


class DivergenceMask(LossSection):
    """A token beyond a bound of divergence has no gradient, whatever its advantage; the others have no clip.

    The authors' bound is around the behaviour policy, which is `learner.correction.proximal: behaviour`.
    """

    epsilon: float = Field(default=0.3, gt=0)
    """Largest divergence."""
    tau: float = Field(default=0.0, ge=0)
    """Weight of the squared log ratio π_θ/π_prox of all tokens, which is added."""


class IpoConfig(DivergenceMask):
    """-ratio · A where |π_θ - π_prox| ≤ epsilon (prime-rl)."""

    target: ClassVar[str] = _SELECTIVE + "ipo"
    name: Literal["ipo"]


class KpopConfig(DivergenceMask):
    """-ratio · A where the binary KL is at most epsilon in both directions (ringtech.notion.site/kpop)."""

    target: ClassVar[str] = _SELECTIVE + "kpop"
    name: Literal["kpop"]
    epsilon: float = Field(default=0.1, gt=0)
    """Largest divergence, in nats."""


class DroConfig(LossSection):
    """Policy gradient with a quadratic penalty on each token's log ratio (arXiv 2405.19107)."""

    target: ClassVar[str] = _CLIPPED + "dro"
    regularised: ClassVar[bool] = True
    name: Literal["dro"]
    beta: float = Field(default=0.5, gt=0)
    """Weight of the penalty."""


class ClipCovConfig(RatioClip):
    """PPO that takes the gradient from a few random tokens with a high covariance (arXiv 2505.22617)."""

    target: ClassVar[str] = _SELECTIVE + "clip_cov"
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

    target: ClassVar[str] = _SELECTIVE + "kl_cov"
    regularised: ClassVar[bool] = True
    name: Literal["kl_cov"]
    ratio: float = Field(default=2e-4, gt=0, le=1)
    """Share of a micro-batch's tokens that are penalised, at least one."""
    coefficient: float = Field(default=1.0, ge=0)
    """Weight of the penalty |log ratio|."""


class ReinforceConfig(LossSection):
    """-A · log π, without any ratio (Williams 1992)."""

    target: ClassVar[str] = _CLIPPED + "reinforce"
    name: Literal["reinforce"]


class ToprConfig(LossSection):
    """Good answers count fully, bad ones by their truncated sequence ratio (arXiv 2503.14286)."""

    target: ClassVar[str] = _CLIPPED + "topr"
    weighted: ClassVar[bool] = True
    name: Literal["topr"]
    cap: float = Field(default=1.0, gt=0)
    """Cap of the bad answers' ratio π_θ/μ."""


PositivePair = tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]]


class VespoConfig(LossSection):
    """-W^k · e^(λ(1 - W)) · A · log π with a constant ratio W = π_θ/μ of the whole answer (arXiv 2602.10693)."""

    target: ClassVar[str] = _CLIPPED + "vespo"
    weighted: ClassVar[bool] = True
    name: Literal["vespo"]
    positive: PositivePair = (2.0, 3.0)
    """k and λ of good answers (advantage ≥ 0)."""
    negative: PositivePair = (3.0, 2.0)
    """k and λ of bad answers."""


class AsympoConfig(LossSection):
    """-A · log π over the answer's mean -log π: needs no log-probs of the behaviour policy (arXiv 2606.03070)."""

    target: ClassVar[str] = _CLIPPED + "asympo"
    weighted: ClassVar[bool] = True
    name: Literal["asympo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    """As for every loss; the paper's is the default."""


class KimiConfig(LossSection):
    """Policy gradient with the square of the answer's log ratio as its regulariser (arXiv 2501.12599)."""

    target: ClassVar[str] = _CLIPPED + "kimi"
    regularised: ClassVar[bool] = True
    name: Literal["kimi"]
    aggregation: Aggregation = "seq-mean-token-sum"
    """As for every loss; the paper's is the default."""
    tau: float = Field(default=0.1, gt=0)
    """Weight of the regulariser."""


class SppoConfig(LossSection):
    """(log(π_θ/π_prox) of the whole answer - eta · A)², with `advantage: win_rate` (arXiv 2405.00675)."""

    target: ClassVar[str] = _CLIPPED + "sppo"
    regularised: ClassVar[bool] = True
    name: Literal["sppo"]
    aggregation: Aggregation = "seq-mean-token-sum"
    """As for every loss; the paper's is the default."""
    eta: float = Field(default=1000.0, gt=0)
    """η: the log-ratio of an answer that always wins becomes η/2."""


_LOSSES: Final = (
    PpoConfig,
    DecoupledPpoConfig,
    GspoConfig,
    CispoConfig,
    GmpoConfig,
    SapoConfig,
    DppoTvConfig,
    DppoKlConfig,
    IpoConfig,
    KpopConfig,
    DroConfig,
    ClipCovConfig,
    KlCovConfig,
    ReinforceConfig,
    ToprConfig,
    VespoConfig,
    AsympoConfig,
    KimiConfig,
    SppoConfig,
)
LOSSES: Final = registry_of("loss", *_LOSSES)


class LossPlugin(PluginSection, LossSection):
    """A loss of the user's own: `(LossInputs, **options) -> LossTerms`, see learner/algorithms/losses."""

    registry: ClassVar[Registry] = LOSSES


if TYPE_CHECKING:
    LossConfig = LossSection
else:
    LossConfig = one_of(*_LOSSES, LossPlugin)
