"""The learner: batch, loss, optimizer, checkpoints."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from slipstream.configs.schema.advantages import AdvantageConfig, GrpoConfig
from slipstream.configs.schema.base import Seconds, Section, UserPath
from slipstream.configs.schema.distill import DistillConfig
from slipstream.configs.schema.losses import LossConfig, PpoConfig
from slipstream.configs.schema.trainers import RlConfig, TrainerConfig


class RejectionConfig(Section):
    """A bound of π_prox/μ; actions or answers beyond it are masked out of the loss and its mean."""

    level: Literal["token", "sequence_mean", "sequence_sum", "sequence_max"]
    """Unit that is masked: each action, or the answer by the mean, the sum or the maximum of its actions' estimates.
    `sequence_mean` of `k1` is the geometric mean of the ratios, `sequence_sum` their product."""
    estimator: Literal["k1", "k2", "k3"]
    """`k1` bounds the ratio itself (below and above); `k2` and `k3` estimate KL(μ‖π_prox), in nats (above only)."""
    low: float | None = Field(default=None, ge=0)
    """Smallest ratio, for `k1` only; unset: 1/high."""
    high: float | None = Field(default=None, gt=0)
    """Largest ratio, or largest estimate; may be left out where `low` is given."""
    only_bad: bool = False
    """Mask only actions whose advantage is negative (DeepSeek-V3.2, arXiv 2512.02556)."""

    @property
    def name(self) -> str:
        """Reason under which masked actions are counted."""
        return f"{self.level}_{self.estimator}"

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.estimator != "k1" and self.low is not None:
            raise ValueError(f"low is for the estimator k1; {self.estimator} is never negative and has only high")
        if self.high is None:
            if self.low is None:
                raise ValueError("give high, or low for the estimator k1")
        elif self.low is not None and self.low >= self.high:
            raise ValueError(f"low={self.low:g} must be less than high={self.high:g}")
        elif self.estimator == "k1" and self.low is None and self.high <= 1:
            raise ValueError(f"high={self.high:g} must be more than 1, unless low is given: it is 1/high otherwise")
        return self


class CorrectionConfig(Section):
    """Off-policy correction between three policies: behaviour μ (generated), proximal (anchor), target (optimised)."""

    proximal: Literal["recompute", "interpolate", "behaviour"] = "recompute"
    """Anchor of the trust region: the weights before the step's first update (one more forward pass if a step has
    several updates), a log-linear interpolation between μ and the target by the training steps between them (no forward
    pass; AReaL's `prox_logp_method: loglinear`), or μ itself (original PPO, without an importance weight)."""
    weight: Literal["none", "token", "sequence"] = "token"
    """Importance weight π_prox/μ that multiplies the loss: none, per action, or the product over the answer. Unset with
    `proximal: behaviour`: `none`."""
    cap: float | None = Field(default=2.0, gt=0)
    """Upper bound of the weights (truncated importance sampling, arXiv 1802.01561); null: none. Unset with a `band` or
    without weight: null."""
    band: tuple[float, float] | None = None
    """[low, high] beyond which weights become 0 (IcePop), instead of `cap`; unset: none."""
    normalise: bool = False
    """Divide the weights by their mean over the step."""
    rejections: tuple[RejectionConfig, ...] = ()
    """Masks by bounds of the ratio."""
    second_moment: float | None = Field(default=None, gt=0)
    """M2PO (arXiv 2510.01161): actions with the largest squared log ratio are masked until its mean over the step is at
    most this (paper: 0.04); unset: none."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Answers with an action whose π_prox/μ is below this (such as 1e-4) are masked; unset: none."""

    reference_ess: float | None = Field(default=None, gt=0, le=1)
    """VCPO (arXiv 2602.17616): each update's learning rate is multiplied by √(ESS/this), at most 1, with the effective
    sample size of the answers' ratios π_θ/μ as a share of the answers; this is that of fresh answers, such as 1."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """Sets defaults that depend on other keys, so that a dumped configuration loads as an equal one."""
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
        """Reasons for which actions may be masked."""
        others = {"veto": self.veto, "second_moment": self.second_moment}
        return [rule.name for rule in self.rejections] + [name for name, value in others.items() if value is not None]

    @property
    def needs_proximal_first(self) -> bool:
        """True if π_prox of the whole step is needed before the first update's loss."""
        return bool(self.normalise or self.rejections or self.second_moment or self.veto)


KlEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "k3*"]


class KlConfig(Section):
    """Penalty on KL(π_θ‖π_ref) to a frozen reference model, sharded like the policy."""

    coefficient: float = Field(ge=0)
    """Weight of the penalty; with `target`, its initial value. 0: the divergence is only measured, and the reference is
    there for `learner.streams.ref_kl` and `advantage: online_dpo`."""
    estimator: KlEstimator = "k3"
    """Estimate per action, of δ = log π_θ - log π_ref: δ, δ²/2, e^-δ - 1 + δ, |δ|. With `+`: that value with the
    gradient of k2, which is unbiased for fresh answers. `k3*` is k3 times π_θ/μ, whose value and gradient are unbiased
    for stale answers too (DeepSeek-V3.2, arXiv 2512.02556)."""
    place: Literal["loss", "reward"] = "loss"
    """Added to the loss, or subtracted from each token's reward (of π_prox, without gradient)."""
    target: float | None = Field(default=None, gt=0)
    """KL per action that the adaptive coefficient aims at (arXiv 1909.08593, section 2.2); unset: it is fixed."""
    horizon: int = Field(default=10_000, ge=1)
    """Of `target`: answers over which a KL that is off by 20 % or more changes the coefficient by about a fifth."""
    reference: UserPath | None = None
    """Folder of the reference model, with the policy's tokenizer; unset: the policy's initial weights."""

    @model_validator(mode="after")
    def _gradient(self) -> Self:
        if self.place == "reward" and self.estimator.endswith(("+", "*")):
            raise ValueError(f"estimator {self.estimator!r} is for place: loss; a reward has no gradient")
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator 'k1' is for place: reward; its gradient does not depend on the reference: take k1+, k2 or k3"
            )
        return self


class StreamsConfig(Section):
    """Weights of the losses that are added up; each is a mean over tokens of its own, on all ranks."""

    rl: float = Field(default=1.0, ge=0)
    """Of the policy loss of the actions, with entropy bonus and KL penalty; 0: none."""
    ce: float = Field(default=0.0, ge=0)
    """Of the cross-entropy of what the env shows after an action (ECHO, arXiv 2605.24517: 0.05), at temperature 1; 0:
    these tokens are not scored."""
    ref_kl: float = Field(default=0.0, ge=0)
    """Of the on-policy distillation: by the teachers and the loss of `learner.distill`, or without that by a policy
    gradient with advantages log π_ref - log π_θ at each action, from `learner.kl.reference`; 0: none."""

    @property
    def further(self) -> list[str]:
        """Names of the streams beside `rl` that have a weight."""
        return [name for name, weight in self if name != "rl" and weight]


Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The optimizer, with linear warm-up and decay."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """`adamw_8bit` keeps AdamW's averages in 8 bits (extra `torchao`). `muon` is Muon for the matrices of the layers,
    scaled so that it takes AdamW's learning rate, and AdamW for the rest: for GPUs."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.99)
    """AdamW's running-average coefficients."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warm-up from 0; at most all of the run."""
    final_lr_fraction: float = Field(default=0.0, ge=0, le=1)
    """Learning rate after the last step, as a share of the peak; 1: no decay."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Maximal global norm of the gradients."""


class CriticConfig(Section):
    """Value model for `learner.advantage: gae`, sharded like the policy."""

    path: UserPath | None = None
    """Folder of the initial model, with the policy's tokenizer: with the trained head of a value or reward model, or
    else a head that starts at zero. Unset: the policy's."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of the returns that it predicts; 1 is Monte Carlo, unbiased (VAPO, arXiv 2504.05118)."""
    clip_range: float | None = Field(default=0.2, gt=0)
    """Change of a value within a step beyond which it gets no gradient; unset: no limit."""
    pretrain_steps: int = Field(default=0, ge=0)
    """First steps, which train the critic alone (VAPO's value pre-training); the policy's warm-up follows."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


class ProcessRewardConfig(Section):
    """Implicit process reward model for `learner.advantage: prime`, sharded like the policy (arXiv 2502.01456).

    A language model that is trained on the outcomes of each step's answers, by the cross-entropy of the rewards,
    limited to 0..1. The reward of a token is β · log of its probability over that under the model's initial weights.
    """

    path: UserPath | None = None
    """Folder of the initial model, with the policy's tokenizer; unset: the policy's."""
    beta: float = Field(default=0.05, gt=0)
    """β."""
    optimizer: OptimizerConfig = OptimizerConfig()


class ThrottleConfig(Section):
    """Adapts the effective `buffer.max_staleness`, down to `min_staleness`, to the off-policy metrics.

    One metric beyond its limit halves it; if all are within half of their limits for ten steps in a row, it
    rises by one.
    """

    min_ess: float | None = Field(default=0.5, gt=0, lt=1)
    """Smallest effective sample size, as a share of the actions; unset: ignored."""
    max_kl: float | None = Field(default=0.1, gt=0)
    """Largest KL(μ‖π_θ) per action (k3), in nats; unset: ignored."""
    max_masked: float | None = Field(default=0.5, gt=0, le=1)
    """Largest share of masked actions; unset: ignored."""
    max_mismatch: float | None = Field(default=None, gt=0)
    """Largest mean |Δ log-prob| between engine and learner at the same weights; unset: ignored."""
    hold_steps: int = Field(default=5, ge=0)
    """Training steps after a cut without another: the groups in the buffer are to be used first, which takes up to
    (`buffer.max_staleness` + 1) · `weights.publish_every_steps` steps."""
    min_staleness: int = Field(default=0, ge=0)
    """Smallest effective bound."""
    learning_rate: bool = False
    """Also halve the learning rate with each cut, and double it (up to its schedule) with each rise."""

    @model_validator(mode="after")
    def _watches(self) -> Self:
        if self.min_ess is None and self.max_kl is None and self.max_masked is None and self.max_mismatch is None:
            raise ValueError("give at least one of min_ess, max_kl, max_masked and max_mismatch")
        return self


class ParallelConfig(Section):
    """Mesh of the learner's ranks; the sizes, without `ep`, multiply to their number."""

    dp_replicate: int = Field(default=1, ge=1)
    """Copies of the model (HSDP): gradients are reduced within a copy first, and then between the copies."""
    dp_shard: int | None = Field(default=None, ge=1)
    """Ranks over which a copy of the model is sharded (FSDP); unset: all that the other sizes leave."""
    cp: int = Field(default=1, ge=1)
    """Context parallelism (Ulysses): ranks that share the tokens of a micro-batch."""
    tp: int = Field(default=1, ge=1)
    """Tensor parallelism: ranks that share each matrix."""
    ep: int = Field(default=1, ge=1)
    """Expert parallelism: ranks that share the experts of a layer; they are ranks of the other axes."""


class CheckpointConfig(Section):
    """Checkpoints of model, optimizer and step (torch.distributed.checkpoint)."""

    every_steps: int = Field(default=100, ge=1)
    """Steps between two checkpoints; the last step is saved too. After a skipped update, one step later."""
    keep: int = Field(default=2, ge=1)
    """Number of latest checkpoints that are kept."""
    asynchronous: bool = False
    """Write checkpoints while training goes on, from a copy of the state in the host's memory; the groups up to their
    step are kept until they are complete. The last one is waited for."""
    upload: str | None = None
    """Address of an object store (fsspec), such as `s3://bucket/prefix` with the extra `s3`: complete checkpoints, the
    latest `keep`, and the trained model are copied to `<upload>/<run.name>` while training goes on, and a learner whose
    run folder has no checkpoint fetches the latest. Credentials come from its environment alone."""

    @field_validator("upload")
    @classmethod
    def _is_address(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r"[a-z0-9+.-]+://[^@\s]+", url):
            raise ValueError("is no address such as s3://bucket/prefix, without a user or a password")
        return url


class LearnerConfig(Section):
    """The learner: trainer, batch, objective, optimizer, checkpoints."""

    trainer: TrainerConfig = RlConfig()
    """The kind of training. Only `rl` uses groups, advantages, losses, corrections, `kl`, `critic` and
    `throttle`, and the sections env, rewards, rollout, buffer, redis, weights and eval; others are a learner alone.
    `streams` and `distill` are of `rl` and `distill`."""
    steps: int = Field(default=1000, ge=1)
    """Training steps."""
    groups_per_step: int = Field(default=32, ge=1)
    """Groups leased for one step."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates per step, each on an equal share of the groups."""
    token_budget: int = Field(default=16384, ge=8)
    """Maximal tokens of one packed micro-batch; those of a prefix that sequences share count once."""
    logits_bytes: int = Field(default=1 << 29, ge=0)
    """Most memory for the logits of a micro-batch, which are kept for its backward pass; those of a larger one are
    computed a second time."""
    advantage: AdvantageConfig = GrpoConfig()
    length_penalty: float | None = Field(default=None, gt=0)
    """Coefficient of a penalty that is subtracted from each reward: this · mean reward of the group · tokens / tokens
    of its longest answer, for rewards from 0 to 1 (prime-rl: 0.25); unset: none."""
    loss: LossConfig = PpoConfig()
    correction: CorrectionConfig = CorrectionConfig()
    streams: StreamsConfig = StreamsConfig()
    kl: KlConfig | None = None
    """Penalty on the divergence from a reference policy; unset: none, and no reference model is loaded."""
    distill: DistillConfig | None = None
    """Distillation from teachers; unset: none."""
    critic: CriticConfig | None = None
    """Value model, for `advantage: gae`; unset: none."""
    process_reward: ProcessRewardConfig | None = None
    """Process reward model, for `advantage: prime`; unset: none."""
    throttle: ThrottleConfig | None = None
    """Adaptive bound of the staleness; unset: `buffer.max_staleness` throughout."""
    optimizer: OptimizerConfig = OptimizerConfig()
    ranks: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Learner ranks that `slipstream up` starts; torchrun has a number of its own. `auto`: the product of the sizes
    under `parallel`, or as many as have a GPU of `gpus.learner` and equally many groups."""
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    attention: Literal["auto", "varlen", "flex", "segments", "flash_attention_2", "flash_attention_3"] = "auto"
    """Kernel of attention over packed sequences. `auto`: the first of `varlen`, `flex` and `segments` that device and
    model permit; the learner logs which. `segments` runs on any device; the last two need the extra `flash`
    and `model.dtype` bfloat16."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass to save memory: of each layer all but its input (`full`), or all but
    the results of attention and of every second matrix product (`selective`)."""
    offload: bool = False
    """Keep weights, gradients and optimizer in the host's memory; each layer is copied to the GPU when it is needed."""
    compile: bool = False
    """Compile each layer but its attention (torch.compile): the first steps take minutes, later ones less time."""
    router_replay: bool = False
    """In a mixture of experts, train with the experts that the engine chose for each token (arXiv 2510.11370), which
    trajectories then contain: a byte for each, such as 384 a token of Qwen3-30B-A3B."""
    wait_deadline_s: Seconds = 600.0
    """Time that the learner waits for enough ready groups; then it exits. Unsaved steps are
    saved first, which may free memory in Redis, and it waits once more. Also the deadline of a silent rank, and of the
    last checkpoint when `slipstream up` is stopped. More than `rollout.group_deadline_s`."""

    @property
    def uses_buffer(self) -> bool:
        """True if training needs buffer, Redis, rollout servers, env and rewards; other trainers are learners alone."""
        return self.trainer.name == "rl"

    def with_algorithm(self, algorithm: "AlgorithmConfig") -> Self:
        """These settings with the parts that an env's algorithm sets."""
        return self.model_copy(update={name: part for name, part in algorithm if part is not None})

    def problems(self) -> list[str]:
        """Combinations within this section that can't work with any trainer."""
        warmups = [] if self.uses_buffer else self._warmup_problems(0)  # of RL, a critic's pre-training counts too
        if self.compile and self.activation_checkpointing == "selective":
            return [
                *warmups,
                "learner.activation_checkpointing: selective chooses among operations, which learner.compile merges; "
                "take full or none",
            ]
        return warmups

    def rl_problems(self) -> list[str]:
        """Combinations within this section that can't work in RL."""
        return [*self.objective_problems(), *self._step_problems()]

    def objective_problems(self) -> list[str]:
        """Parts of the objective that don't work together."""
        advantage, loss, correction, problems = self.advantage, self.loss, self.correction, []
        if (advantage.name == "gae") != (self.critic is not None):
            problems.append("learner.advantage: gae and learner.critic need each other; give both or neither")
        if (advantage.name == "prime") != (self.process_reward is not None):
            problems.append("learner.advantage: prime and learner.process_reward need each other; give both or neither")
        if advantage.name == "online_dpo":
            problems += self._online_dpo_problems()
        if (loss.aggregation == "constant") != (loss.constant is not None):
            problems.append("learner.loss.aggregation: constant and learner.loss.constant need each other")
        if loss.name == "decoupled_ppo" and (correction.proximal == "behaviour" or correction.weight == "none"):
            problems.append(
                "learner.loss: decoupled_ppo needs learner.correction.proximal other than behaviour and "
                "learner.correction.weight other than none; without them it is ppo"
            )
        if loss.weighted and correction.weight != "none":
            problems.append(
                f"learner.loss: {loss.name} corrects for the behaviour policy itself; "
                "set learner.correction.weight: none, or staleness is corrected twice"
            )
        if advantage.name == "gdpo" and self.kl is not None and self.kl.place == "reward":
            problems.append(
                "learner.advantage: gdpo uses the reward terms, which learner.kl.place: reward does not change; "
                "use place: loss"
            )
        if not (self.streams.rl or self.streams.further):
            problems.append("learner.streams: all weights are 0, so there is nothing to learn from")
        if self.streams.ref_kl and self.kl is None and self.distill is None:
            problems.append(
                "learner.streams.ref_kl needs teachers under learner.distill, or learner.kl with a reference; with "
                "coefficient: 0 that adds no penalty"
            )
        if advantage.name == "gdpo" and self.length_penalty is not None:
            problems.append("learner.advantage: gdpo uses reward terms, which learner.length_penalty does not change")
        if loss.regularised and self.updates_per_step == 1 and correction.proximal == "recompute":
            problems.append(
                f"learner.loss: {loss.name} keeps π_θ near π_prox, which is π_θ itself with learner.updates_per_step=1 "
                "and learner.correction.proximal=recompute: take more updates, or proximal: behaviour"
            )
        return problems

    def _online_dpo_problems(self) -> list[str]:
        needed = {
            "learner.kl, whose reference is DPO's (coefficient: 0 for no penalty)": self.kl is not None,
            "learner.updates_per_step=1, as its factors are of the step's first weights": self.updates_per_step == 1,
            "learner.loss: reinforce": self.loss.name == "reinforce",
            "learner.loss.aggregation: seq-mean-token-sum": self.loss.aggregation == "seq-mean-token-sum",
        }
        return [f"learner.advantage: online_dpo needs {what}" for what, given in needed.items() if not given]

    def _step_problems(self) -> list[str]:
        problems = []
        if self.groups_per_step % self.updates_per_step:
            problems.append(
                f"learner.groups_per_step={self.groups_per_step} must be a multiple of "
                f"learner.updates_per_step={self.updates_per_step}"
            )
        pretrain = 0 if self.critic is None else self.critic.pretrain_steps
        if pretrain >= self.steps:
            problems.append(
                f"learner.critic.pretrain_steps={pretrain} must be less than "
                f"learner.steps={self.steps}, or the policy is never trained"
            )
        else:
            problems += self._warmup_problems(pretrain)
        return problems

    def _warmup_problems(self, pretrain: int) -> list[str]:
        """Warm-ups that outlast the training: the learning rate would never reach its peak."""
        warmups = [("learner.optimizer", self.optimizer, self.steps - pretrain)]
        if self.critic is not None:
            warmups.append(("learner.critic.optimizer", self.critic.optimizer, self.steps))
        if self.process_reward is not None:
            warmups.append(("learner.process_reward.optimizer", self.process_reward.optimizer, self.steps))
        after = f" less {pretrain} of learner.critic.pretrain_steps" if pretrain else ""
        return [
            f"{key}.warmup_steps={optimizer.warmup_steps} is more than learner.steps={self.steps}"
            f"{after if optimizer is self.optimizer else ''}: {key}.lr={optimizer.lr:g} would never be reached; lower "
            "warmup_steps (0: no warm-up), or take more steps"
            for key, optimizer, steps in warmups
            if optimizer.warmup_steps > steps
        ]


class AlgorithmConfig(Section):
    """Parts of the objective for the groups of one env of a mixture, each in place of the whole one under `learner`; a
    part that is unset is the learner's."""

    advantage: AdvantageConfig | None = None
    loss: LossConfig | None = None
    correction: CorrectionConfig | None = None
    streams: StreamsConfig | None = None
