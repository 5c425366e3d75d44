"""The learner: batch, loss, optimizer, checkpoints."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from slipstream.configs.schema.algorithms import REGULARISED, AdvantageConfig, GrpoConfig, LossConfig, PpoConfig
from slipstream.configs.schema.base import Seconds, Section, UserPath


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


Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW with linear warm-up and decay."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.99)
    """AdamW's running-average coefficients."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warm-up from 0."""
    final_lr_fraction: float = Field(default=0.0, ge=0, le=1)
    """Learning rate that the linear decay has reached after the last step, as a share of the peak; 1: no decay."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled to at most this global norm."""


class CriticConfig(Section):
    """A value model, sharded like the policy; `learner.advantage: gae` needs one."""

    path: UserPath | None = None
    """Folder of the model that it starts from, with a value head of zeros and the policy's tokens; unset: the
    policy's."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of the returns that it learns to predict: 1 is Monte Carlo, unbiased (VAPO, arXiv 2504.05118)."""
    clip_range: float | None = Field(default=0.2, gt=0)
    """A value may move by this much in a step before it stops getting a gradient; unset: no limit."""
    pretrain_steps: int = Field(default=0, ge=0)
    """Steps at the start that train the critic alone (VAPO's value pre-training); the policy's warm-up comes after."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


class ThrottleConfig(Section):
    """Watches the off-policy figures, and moves the effective `buffer.max_staleness` between `min_staleness` and it.

    One figure beyond its limit halves the staleness; all of them on the good side of half their limit, for `calm_steps`
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

    @model_validator(mode="after")
    def _watches(self) -> Self:
        if self.min_ess is None and self.max_kl is None and self.max_masked is None and self.max_mismatch is None:
            raise ValueError("give at least one of min_ess, max_kl, max_masked and max_mismatch")
        return self


class CheckpointConfig(Section):
    """Checkpoints of model, optimizer and step (torch.distributed.checkpoint)."""

    every_steps: int = Field(default=100, ge=1)
    """Save each time this many steps are done, and after the last; right after a skipped update, one step later."""
    keep: int = Field(default=2, ge=1)
    """Latest checkpoints to keep."""


class LearnerConfig(Section):
    """What the learner does with the groups that it leases."""

    steps: int = Field(default=1000, ge=1)
    """Training steps."""
    groups_per_step: int = Field(default=32, ge=1)
    """Groups leased for one step."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates per step: the groups are split into that many mini-batches."""
    token_budget: int = Field(default=16384, ge=8)
    """Most tokens in one packed micro-batch."""
    advantage: AdvantageConfig = GrpoConfig()
    loss: LossConfig = PpoConfig()
    correction: CorrectionConfig = CorrectionConfig()
    kl: KlConfig | None = None
    """Penalty on the divergence from a reference policy; unset: none, and no reference model is loaded."""
    critic: CriticConfig | None = None
    """Value model, for `advantage: gae`; unset: none."""
    throttle: ThrottleConfig | None = None
    """Less staleness when training can't bear it; unset: `buffer.max_staleness` holds throughout."""
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    attention: Literal["segments", "flash_attention_2"] = "segments"
    """Over packed sequences: `segments` is exact on any device, `flash_attention_2` needs the extra `flash`."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass to save memory."""
    wait_deadline_s: Seconds = 600.0
    """How long the learner waits for enough ready groups; then it ends and says what the buffer holds. Where steps are
    not saved yet it saves them first, which may make room in Redis, and waits as long once more. Its ranks wait
    as long for one that is silent, and end; and `slipstream up`, when it is stopped, for the learner to save its step.
    More than `rollout.group_deadline_s`."""

    def problems(self) -> list[str]:
        """Combinations within this section that can't work."""
        return [*self._objective_problems(), *self._step_problems()]

    def _objective_problems(self) -> list[str]:
        advantage, loss, correction, problems = self.advantage, self.loss, self.correction, []
        if (advantage.name == "gae") != (self.critic is not None):
            problems.append("learner.advantage: gae and learner.critic need each other; give both or neither")
        if (loss.aggregation == "constant") != (loss.constant is not None):
            problems.append("learner.loss.aggregation: constant and learner.loss.constant need each other")
        if loss.name == "decoupled_ppo" and (correction.proximal == "behaviour" or correction.weight == "none"):
            problems.append(
                "learner.loss: decoupled_ppo needs learner.correction.proximal other than behaviour and "
                "learner.correction.weight other than none; without them it is ppo"
            )
        if loss.name == "topr" and correction.weight != "none":
            problems.append(
                "learner.loss: topr weighs by the ratio to the behaviour policy itself; "
                "set learner.correction.weight: none, or staleness is paid for twice"
            )
        if advantage.name == "gdpo" and self.kl is not None and self.kl.place == "reward":
            problems.append(
                "learner.advantage: gdpo looks at the reward terms, where learner.kl.place: reward does not reach; "
                "use place: loss"
            )
        if loss.name in REGULARISED and self.updates_per_step == 1 and correction.proximal == "recompute":
            problems.append(
                f"learner.loss: {loss.name} keeps π_θ near π_prox, which is π_θ itself with learner.updates_per_step=1 "
                "and learner.correction.proximal=recompute: take more updates, or proximal: behaviour"
            )
        return problems

    def _step_problems(self) -> list[str]:
        problems = []
        if self.groups_per_step % self.updates_per_step:
            problems.append(
                f"learner.groups_per_step={self.groups_per_step} must be a multiple of "
                f"learner.updates_per_step={self.updates_per_step}"
            )
        if self.critic is not None and self.critic.pretrain_steps >= self.steps:
            problems.append(
                f"learner.critic.pretrain_steps={self.critic.pretrain_steps} must be less than "
                f"learner.steps={self.steps}, or the policy is never trained"
            )
        return problems
