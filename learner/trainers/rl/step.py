"""One RL training step: preparation, then optimizer updates of policy and critic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.tracing import span
from slipstream.configs.schema.learner import LearnerConfig, OptimizerConfig
from slipstream.configs.schema.rollout import SamplingConfig
from slipstream.configs.schema.run import RewardConfig
from slipstream.learner.algorithms.aggregation import Totals, aggregate, totals_of
from slipstream.learner.algorithms.critic import Critic
from slipstream.learner.algorithms.divergence import KlCoefficient, answer_weight_sums, learning_rate_factor
from slipstream.learner.algorithms.losses.clipped import value_loss
from slipstream.learner.algorithms.objective import Objective
from slipstream.learner.algorithms.prepare import PreparedStep, StepPreparer
from slipstream.learner.algorithms.process_reward import ProcessRewardModel
from slipstream.learner.algorithms.registry import Algorithm
from slipstream.learner.algorithms.teachers import Teachers, Teaching
from slipstream.learner.checkpoint import ModelsAndOptimizers
from slipstream.learner.data.buffer_feed import StepData
from slipstream.learner.data.packing import MicroBatch, aligned
from slipstream.learner.data.prefix_tree import PrefixSharing
from slipstream.learner.metrics.action_trace import ActionTrace
from slipstream.learner.metrics.sums import StepSums, trajectory_metrics
from slipstream.learner.models.flops import ModelFlops
from slipstream.learner.models.fused_head import Entropy
from slipstream.learner.models.moe import expert_metrics
from slipstream.learner.models.optim import SkippedUpdates, learning_rate, optimizer_step, set_learning_rate
from slipstream.learner.models.prefix_sharing import common_sharing
from slipstream.learner.models.reproducibility import weights_checksum
from slipstream.learner.models.scoring import Readout, score_actions
from slipstream.learner.parallel.mesh import World

log = get_log("learner.step")


@dataclass
class TrainStep:
    """Models and optimizers of an RL training, and its training step; on every rank."""

    algorithms: Mapping[str, LearnerConfig]
    """`RunConfig.algorithms`: the learner's settings, and those with the algorithms of single envs."""
    sampling: SamplingConfig
    """Sampling of the rollout servers."""
    rewards: Sequence[RewardConfig]
    steps_per_version: int
    """Training steps between two policy versions."""
    seed: int
    checkpoints: Path
    """Folder of the checkpoints, for error messages."""
    world: World
    model: nn.Module
    """The policy."""
    optimizer: torch.optim.Optimizer
    reference: nn.Module | None
    critic: Critic | None
    process_reward: ProcessRewardModel | None
    teachers: Teachers | None
    kl: KlCoefficient | None
    """Coefficient of the penalty on the divergence from the reference."""
    lr_scale: float = 1.0
    """Factor of the policy's scheduled learning rate, set by the throttle."""
    skipped: SkippedUpdates = field(init=False)
    """Those of policy and critic."""
    flops: ModelFlops = field(init=False)
    """Of the policy."""
    _further_flops: Sequence[ModelFlops] = field(init=False)
    """Of the other models that every update trains."""
    _prepare: StepPreparer = field(init=False)
    _lr: float = field(init=False, default=0.0)
    """The policy's learning rate in the present step."""

    def __post_init__(self) -> None:
        self.flops = ModelFlops.of_model(self.model)
        self._further_flops = [model.flops for model in (self.critic, self.process_reward) if model is not None]
        self.skipped = SkippedUpdates(self.learner.updates_per_step, self.checkpoints)
        self._algorithms = [Algorithm.of(each) for each in self.algorithms.values()]
        self._prepare = StepPreparer(
            learner=self.learner,
            temperature=self.sampling.temperature,
            term_weights=[term.weight for term in self.rewards if term.weight],
            steps_per_version=self.steps_per_version,
            world=self.world,
            algorithms=self._algorithms,
            model=self.model,
            reference=self.reference,
            critic=self.critic,
            process_reward=self.process_reward,
        )

    def run(self, data: StepData, *, unpublished_steps: int, traced: ActionTrace | None = None) -> dict[str, float]:
        """Trains on one step's groups; a collective.

        Args:
            unpublished_steps: training steps since the consuming version was published; 0: the present weights are that
                version.
            traced: records values of single rows.

        Returns: the step's metrics, of all ranks together.

        Raises: DivergedError, on all ranks, when a model is not updated any more.
        """
        reasons = dict.fromkeys(reason for each in self.algorithms.values() for reason in each.correction.reasons)
        streams = dict.fromkeys(name for each in self.algorithms.values() for name in each.streams.further)
        sums = StepSums(self.world.device, list(reasons), list(streams))
        updates = [aligned(batches, self.world) for batches in data.updates]
        rows = data.rows.to(self.world.device)
        self._set_learning_rates(data.step, sums)
        skipped_before = self.skipped.count
        own_version = None if unpublished_steps else data.consuming_version
        teaching = None if self.teachers is None else self.teachers.of_step(data.trajectories, rows.mask_BT)
        with span("score"):
            prepared = self._prepare(
                rows,
                updates,
                consuming_version=data.consuming_version,
                unpublished_steps=unpublished_steps,
                kl_coefficient=self._kl_coefficient,
                taught_BT=None if teaching is None else teaching.mask_BT,
            )
        if traced is not None:
            traced.prepared(data.updates, prepared.advantages_BT)
        if prepared.correction is not None:
            sums.add_masked(prepared.correction.masked)
        sums.add(**{f"{name}_tokens": stream.mask_BT.sum() for name, stream in prepared.streams.items()})
        sums.add(episodes=rows.episodes)
        for number, batches in enumerate(updates):
            sums.add(
                sequence_tokens=sum(batch.sequence_tokens for batch in data.updates[number]),
                input_tokens=sum(batch.input_ids_1N.numel() for batch in data.updates[number]),
            )
            sums.add(flops=self._flops_of(data.updates[number], trains_policy=data.step >= self._pretrain_steps))
            if data.step >= self._pretrain_steps:
                with span("update policy", micro_batches=len(batches)):
                    objective = self._objective(prepared, batches, number, data.step)
                    self._update_policy(batches, objective, own_version, sums, traced, teaching)
            if self.critic is not None:
                with span("update critic", micro_batches=len(batches)):
                    self._update_critic(self.critic, batches, prepared, sums)
            if self.process_reward is not None:
                with span("update process reward model", micro_batches=len(batches)):
                    self._update_process_reward(self.process_reward, batches, prepared, sums)
        sums.set("skipped_updates", self.skipped.count)
        if self.skipped.count > skipped_before:
            skipped = self.skipped.count - skipped_before
            log.warning("updates skipped: their gradients are not finite", step=data.step, updates=skipped)
            self.skipped.require_updates()
        metrics = sums.means(self.world.sum(sums.vector())) | expert_metrics(self.model, self.world)
        if self.kl is not None and "reference_kl" in metrics:
            metrics["kl_coefficient"] = self.kl.value
            self.kl.update(metrics["reference_kl"], episodes=round(metrics["answers"]))
        return (
            trajectory_metrics(
                data.trajectories, rows.episode_B.tolist(), rows.group_E.tolist(), data.staleness, self.world
            )
            | metrics
        )

    def _flops_of(self, batches: Sequence[MicroBatch], *, trains_policy: bool) -> float:
        """Operations of an update on this rank's part of it."""
        trained = [self.flops] if trains_policy else []
        trained += self._further_flops
        lengths = [length for batch in batches for length in batch.segment_lengths]
        before = [depth for batch in batches for depth in batch.segment_depths]
        actions = sum(batch.actions_S.numel() for batch in batches)
        return sum(flops(lengths, actions=actions, before=before) for flops in trained)

    @property
    def sharing(self) -> PrefixSharing | None:
        """The rule by which the step's sequences may share prefixes; None if one of the models can't compute that.

        They do not with teachers, whose scores are by sequence, with targets of a cross-entropy, or with top-k.
        """
        has_targets = any(each.streams.ce for each in self.algorithms.values())
        if self.teachers is not None or has_targets or self.sampling.top_k is not None:
            return None
        others = [other.model for other in (self.critic, self.process_reward) if other is not None]
        return common_sharing([model for model in (self.model, self.reference, *others) if model is not None])

    def _set_learning_rates(self, step: int, sums: StepSums) -> None:
        learner = self.learner
        policy_step = step - self._pretrain_steps
        if policy_step >= 0:
            steps = learner.steps - self._pretrain_steps
            self._lr = self.lr_scale * learning_rate(policy_step, steps=steps, config=learner.optimizer)
            set_learning_rate(self.optimizer, self._lr)
            sums.set("lr", self._lr)
        if self.critic is not None:
            critic_lr = learning_rate(step, steps=learner.steps, config=self.critic.config.optimizer)
            set_learning_rate(self.critic.optimizer, critic_lr)
            sums.set("critic_lr", critic_lr)
        if self.process_reward is not None:
            process_lr = learning_rate(step, steps=learner.steps, config=self.process_reward.config.optimizer)
            set_learning_rate(self.process_reward.optimizer, process_lr)
            sums.set("process_reward_lr", process_lr)

    def _objective(self, prepared: PreparedStep, batches: Sequence[MicroBatch], number: int, step: int) -> Objective:
        seed = np.random.SeedSequence([self.seed, step, number, self.world.data_rank]).generate_state(1)
        mask_BT = prepared.rows.mask_BT if prepared.correction is None else prepared.correction.mask_BT
        return Objective(
            algorithms=self._algorithms,
            horizon=self.sampling.max_tokens,
            prepared=prepared,
            update=number,
            totals=self._totals(batches, mask_BT),
            tokens={name: self._totals(batches, each.mask_BT).tokens for name, each in prepared.streams.items()},
            kl_coefficient=self._kl_coefficient,
            generator=torch.Generator().manual_seed(int(seed[0])),
        )

    def _update_policy(
        self,
        batches: Sequence[MicroBatch],
        objective: Objective,
        own_version: int | None,
        sums: StepSums,
        traced: ActionTrace | None,
        teaching: Teaching | None,
    ) -> None:
        entropy: Entropy = "gradient" if any(each.loss.entropy_bonus for each in self.algorithms.values()) else "value"
        reference_ess = self.learner.correction.reference_ess
        answers = torch.zeros(3, dtype=torch.float64, device=self.world.device)
        for index, batch in enumerate(batches):
            readout, teacher_BT = self._teach(teaching, batch)
            scores = score_actions(
                self.model,
                batch,
                temperature=self.sampling.temperature,
                entropy=entropy,
                targets=True,
                kept_bytes=self.learner.logits_bytes,
                readout=readout,
            )
            if batch.actions == 0:
                torch.autograd.backward(scores.logprobs_A.sum())  # the other ranks' backward passes wait for this one
                self._release_teachers()
                continue
            loss, values = objective(scores, batch, teacher_BT)
            # FSDP averages gradients over the ranks, but the loss is normalised over the answers of all ranks.
            torch.autograd.backward(loss * self.world.data_size)
            self._release_teachers()
            sums.add_policy(values, own_version)
            if traced is not None:
                traced.add(objective.update, index, values)
            sums.add(loss=loss.detach() / self.learner.updates_per_step)
            sums.add(**{f"{name}_loss": part / self.learner.updates_per_step for name, part in values.streams.items()})
            if reference_ess is not None:
                answers += answer_weight_sums(values.target_BT - values.behaviour_BT, values.mask_BT)
        if reference_ess is not None:
            lr = self._lr * learning_rate_factor(self.world.sum(answers), reference_ess)
            set_learning_rate(self.optimizer, lr)
            sums.set("lr", lr)
        self._optimizer_step(self.model, self.optimizer, self.learner.optimizer, "grad_norm", sums)
        if self.teachers is not None and not self.skipped.latest:
            self.teachers.follow()

    def _teach(self, teaching: Teaching | None, batch: MicroBatch) -> tuple[Readout | None, Tensor | None]:
        """The teachers' scores of a micro-batch: a readout of divergences, or log-probs [B, T]; a collective."""
        if teaching is None:
            return None, None
        if not teaching.teachers.config.over_vocabulary:
            return None, teaching.logprobs(batch)
        lessons = teaching.lessons(batch)
        return teaching.teachers.readout(lessons, kept_bytes=self.learner.logits_bytes), None

    def _release_teachers(self) -> None:
        if self.teachers is not None:
            self.teachers.release()

    def _update_critic(
        self, critic: Critic, batches: Sequence[MicroBatch], prepared: PreparedStep, sums: StepSums
    ) -> None:
        assert prepared.values_BT is not None and prepared.returns_BT is not None, "a critic, but no values"
        totals = self._totals(batches, prepared.rows.mask_BT)
        for batch in batches:
            values_A = critic.values(batch)
            if batch.actions == 0:
                torch.autograd.backward(values_A.sum())
                continue
            mask_BT, returns_BT = batch.of_step(prepared.rows.mask_BT), batch.of_step(prepared.returns_BT)
            terms = value_loss(
                batch.padded(values_A),
                batch.of_step(prepared.values_BT),
                returns_BT,
                clip_range=critic.config.clip_range,
            )
            loss_BT = batch.of_step(prepared.rows.importance_weights_B[:, None]) * terms.loss_BT
            loss = aggregate(loss_BT, mask_BT, "token-mean", totals, horizon=1, constant=None)
            torch.autograd.backward(loss * self.world.data_size)
            sums.add(value_loss=loss.detach() / self.learner.updates_per_step)
            sums.add_values(batch.of_step(prepared.values_BT), returns_BT, terms.clipped_BT, mask_BT)
        self._optimizer_step(critic.model, critic.optimizer, critic.config.optimizer, "critic_grad_norm", sums)

    def _update_process_reward(
        self, process: ProcessRewardModel, batches: Sequence[MicroBatch], prepared: PreparedStep, sums: StepSums
    ) -> None:
        assert prepared.process is not None, "a process reward model, but no scores"
        answers = self._totals(batches, prepared.rows.mask_BT).sequences
        for batch in batches:
            terms = process.loss(
                batch, prepared.rows, prepared.process, answers=answers, kept_bytes=self.learner.logits_bytes
            )
            torch.autograd.backward(terms.loss * self.world.data_size)
            sums.add(
                process_loss=terms.loss.detach() / self.learner.updates_per_step,
                process_answers=terms.answers,
                process_right=terms.right,
                process_reward=terms.reward,
            )
        self._optimizer_step(
            process.model, process.optimizer, process.config.optimizer, "process_reward_grad_norm", sums
        )

    def _optimizer_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: OptimizerConfig, metric: str, sums: StepSums
    ) -> None:
        norm = optimizer_step(model, optimizer, config)
        sums.set(metric, norm)
        self.skipped.observe(metric, norm)

    def _totals(self, batches: Sequence[MicroBatch], mask_BT: Tensor) -> Totals:
        """Unmasked actions and answers of an update, over all ranks."""
        return totals_of(*(batch.of_step(mask_BT) for batch in batches), total=self.world.sum)

    @property
    def learner(self) -> LearnerConfig:
        """The learner's settings."""
        return self.algorithms[""]

    @property
    def updated(self) -> bool:
        """False if the last update of a model was skipped."""
        return not self.skipped.latest

    @property
    def trained(self) -> ModelsAndOptimizers:
        """Models and optimizers by name, for checkpoints."""
        others = {"critic": self.critic, "process_reward": self.process_reward}
        named = {name: (other.model, other.optimizer) for name, other in others.items() if other is not None}
        averages = {} if self.teachers is None else self.teachers.averages
        return {"policy": (self.model, self.optimizer)} | named | averages

    def checksum(self) -> str:
        """Checksum of all weights that are trained; a collective."""
        return weights_checksum([model for model, _ in self.trained.values()], self.world)

    @property
    def _pretrain_steps(self) -> int:
        """Initial steps that train only the critic."""
        return 0 if self.critic is None else self.critic.config.pretrain_steps

    @property
    def _kl_coefficient(self) -> float:
        return 0.0 if self.kl is None else self.kl.value
