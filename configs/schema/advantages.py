"""Advantages of the learner, and their settings.

A new one takes two edits: its section here, listed in the tuple, and the function that `target` names.
"""

from typing import TYPE_CHECKING, ClassVar, Final, Literal

from pydantic import Field

from slipstream.configs.registry import Registry
from slipstream.configs.schema.base import NamedSection, PluginSection, one_of, registry_of

_FOLDER: Final = "slipstream.learner.algorithms.advantages."
_GROUP, _RETURNS, _PREFERENCES = _FOLDER + "group_relative:", _FOLDER + "returns:", _FOLDER + "preferences:"


class AdvantageSection(NamedSection):
    """Keys of all advantages."""

    group_relative: ClassVar[bool] = False
    """True for advantages that compare the answers of a group, so that it needs two."""
    needs_collision: ClassVar[bool] = False
    """True for advantages that read `collision_BT`."""
    needs_turns: ClassVar[bool] = False
    """True for advantages that read `turn_BT` and `state_BT`."""
    needs_agents: ClassVar[bool] = False
    """True for advantages that read `agent_BT` and `own_rewards_BT`."""
    needs_logprobs: ClassVar[bool] = False
    """True for advantages that read `logprobs_BT`."""


class GrpoConfig(AdvantageSection):
    """(r - mean) / (std + 1e-6) of the group's rewards r, sample std (arXiv 2402.03300)."""

    target: ClassVar[str] = _GROUP + "grpo"
    group_relative: ClassVar[bool] = True
    name: Literal["grpo"] = "grpo"


class DrGrpoConfig(AdvantageSection):
    """r - mean of the group's rewards r (arXiv 2503.20783)."""

    target: ClassVar[str] = _GROUP + "dr_grpo"
    group_relative: ClassVar[bool] = True
    name: Literal["dr_grpo"]


class PassKConfig(AdvantageSection):
    """Only the group's best answer counts, by its lead over the second (arXiv 2503.19595)."""

    target: ClassVar[str] = _GROUP + "grpo_passk"
    group_relative: ClassVar[bool] = True
    name: Literal["grpo_passk"]
    divide_by_std: bool = False
    """Scale by the spread of the group's rewards."""


class GdpoConfig(AdvantageSection):
    """Each reward term is scaled within the group by itself, then they are added up (arXiv 2601.05242)."""

    target: ClassVar[str] = _GROUP + "gdpo"
    group_relative: ClassVar[bool] = True
    name: Literal["gdpo"]


class MaxRlConfig(AdvantageSection):
    """(r - mean) / mean of the group's rewards r, which are 0 or more; 0 where none is more (arXiv 2602.02710)."""

    target: ClassVar[str] = _GROUP + "max_rl"
    group_relative: ClassVar[bool] = True
    name: Literal["max_rl"]


class RlooConfig(AdvantageSection):
    """r - mean of the rewards of the group's other answers (arXiv 2402.14740)."""

    target: ClassVar[str] = _GROUP + "rloo"
    group_relative: ClassVar[bool] = True
    name: Literal["rloo"]


class OpoConfig(AdvantageSection):
    """r - the group's mean weighted by length (arXiv 2505.23585)."""

    target: ClassVar[str] = _GROUP + "opo"
    group_relative: ClassVar[bool] = True
    name: Literal["opo"]


class RemaxConfig(AdvantageSection):
    """r - reward of a greedy answer to the same task (arXiv 2310.10505)."""

    target: ClassVar[str] = _RETURNS + "remax"
    name: Literal["remax"]


class ReinforcePlusPlusConfig(AdvantageSection):
    """Discounted rewards to go, whitened over the batch (arXiv 2501.03262)."""

    target: ClassVar[str] = _RETURNS + "reinforce_plus_plus"
    name: Literal["reinforce_plus_plus"]
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""


class ReinforcePlusPlusBaselineConfig(AdvantageSection):
    """r - mean of the group, whitened over the batch (arXiv 2501.03262)."""

    target: ClassVar[str] = _GROUP + "reinforce_plus_plus_baseline"
    group_relative: ClassVar[bool] = True
    name: Literal["reinforce_plus_plus_baseline"]


class GpgConfig(AdvantageSection):
    """(r - mean) · answers / answers with a gradient (arXiv 2504.02546)."""

    target: ClassVar[str] = _GROUP + "gpg"
    group_relative: ClassVar[bool] = True
    name: Literal["gpg"]
    scale_up_for: Literal["no_advantage", "no_reward"] = "no_advantage"
    """Answers that the others are scaled up for: those of groups without any spread, as in the paper, or those whose
    reward is 0, as verl 0.9.1 counts them."""


class GaeConfig(AdvantageSection):
    """Generalised advantage estimation with a critic (arXiv 1506.02438), whitened over the batch."""

    target: ClassVar[str] = _RETURNS + "gae"
    name: Literal["gae"]
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token, of policy and critic."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of the policy's advantages; the critic's is `learner.critic.lam` (VAPO's decoupling)."""
    length_adaptive: float | None = Field(default=None, gt=0)
    """a of VAPO's λ = 1 - 1/(a · answer length), in place of `lam` (arXiv 2504.05118: 0.05); unset: off."""


class OptimalTokenBaselineConfig(AdvantageSection):
    """Rewards to go minus the baseline of least gradient variance at each token (arXiv 2602.07078)."""

    target: ClassVar[str] = _RETURNS + "optimal_token_baseline"
    group_relative: ClassVar[bool] = True
    needs_collision: ClassVar[bool] = True
    needs_logprobs: ClassVar[bool] = True
    name: Literal["optimal_token_baseline"]


class GigpoConfig(AdvantageSection):
    """`dr_grpo` plus the return of each turn less the mean of the group's turns in the same state (arXiv 2505.10978).

    Turns that follow the same tokens of the env are in the same state.
    """

    target: ClassVar[str] = _GROUP + "gigpo"
    group_relative: ClassVar[bool] = True
    needs_turns: ClassVar[bool] = True
    name: Literal["gigpo"]
    gamma: float = Field(default=0.95, gt=0, le=1)
    """Discount per turn."""
    step_weight: float = Field(default=1.0, ge=0)
    """Weight of the turns' advantages."""
    divide_by_std: bool = False
    """Scale both parts by the spread in their group."""


class RaeGroupConfig(AdvantageSection):
    """`rloo` for each agent of an episode by itself, told apart by the labels of its calls (role-conditioned).

    An agent's reward is what was posted for it or its answers, and what the episode earned besides. It is compared with
    that of the agents of the same label in the group's other episodes; in RAE (arXiv 2506.24119) with a moving average.
    """

    target: ClassVar[str] = _GROUP + "rae_group"
    group_relative: ClassVar[bool] = True
    needs_agents: ClassVar[bool] = True
    name: Literal["rae_group"]


class PrimeConfig(AdvantageSection):
    """RLOO of the outcomes, plus that of the implicit process rewards of each token (arXiv 2502.01456).

    It needs `learner.process_reward`.
    """

    target: ClassVar[str] = _GROUP + "prime"
    group_relative: ClassVar[bool] = True
    name: Literal["prime"]
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token, of the process rewards."""
    process_weight: float = Field(default=1.0, ge=0)
    """Weight of the process rewards beside the outcome."""


class WinRateConfig(AdvantageSection):
    """Share of the group's answers that an answer beats by its reward, less ½ (arXiv 2405.00675)."""

    target: ClassVar[str] = _PREFERENCES + "win_rate"
    group_relative: ClassVar[bool] = True
    name: Literal["win_rate"]


class OnlineDpoConfig(AdvantageSection):
    """The gradient of DPO on pairs of each group, for `loss: reinforce` (arXiv 2402.04792).

    It needs the reference of `learner.kl`, one update a step and `aggregation: seq-mean-token-sum`.
    """

    target: ClassVar[str] = _PREFERENCES + "online_dpo"
    group_relative: ClassVar[bool] = True
    needs_logprobs: ClassVar[bool] = True
    name: Literal["online_dpo"]
    beta: float = Field(default=0.1, gt=0)
    """β of the log-ratio to the reference; a smaller one permits more distance."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """A group's best answers against its worst, or all pairs of answers with different rewards."""


_ADVANTAGES: Final = (
    GrpoConfig,
    DrGrpoConfig,
    PassKConfig,
    GdpoConfig,
    MaxRlConfig,
    RlooConfig,
    OpoConfig,
    RemaxConfig,
    ReinforcePlusPlusConfig,
    ReinforcePlusPlusBaselineConfig,
    GpgConfig,
    GaeConfig,
    OptimalTokenBaselineConfig,
    GigpoConfig,
    RaeGroupConfig,
    PrimeConfig,
    WinRateConfig,
    OnlineDpoConfig,
)
ADVANTAGES: Final = registry_of("advantage", *_ADVANTAGES)


class AdvantagePlugin(PluginSection, AdvantageSection):
    """Advantages of the user's own: `(AdvantageInputs, **options) -> [B, T]`, see learner/algorithms/advantages."""

    registry: ClassVar[Registry] = ADVANTAGES
    needs_turns: ClassVar[bool] = True  # it may read them
    needs_agents: ClassVar[bool] = True


if TYPE_CHECKING:
    AdvantageConfig = AdvantageSection
else:
    AdvantageConfig = one_of(*_ADVANTAGES, AdvantagePlugin)
