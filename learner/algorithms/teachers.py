"""The teachers of a distillation: models in the learner, and what engines gave to the rollout servers.

A teacher sees the policy's answers, behind its own prompt or behind another one that the trajectory brings.

# A actions, B rows (trajectories) of a step or micro-batch, T actions of the longest, K likeliest tokens
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.buffer.wire.codec import action_mask, token_ids
from slipstream.buffer.wire.messages import LOGPROB_DTYPE, MIXTURE, TOKEN_DTYPE, Trajectory
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.distill import DistillConfig, TeacherConfig
from slipstream.learner.algorithms.distillation import Comparison, HeadStates, Lesson, TopTokens, policy_divergence
from slipstream.learner.data.packing import MicroBatch, TokenSequence, empty_micro_batch, pack
from slipstream.learner.models.fused_head import LogitRule
from slipstream.learner.models.identity import require_same_tokens
from slipstream.learner.models.load import ModelOptions, load_model, vocabulary_of
from slipstream.learner.models.lora import has_adapters, without_adapters
from slipstream.learner.models.scoring import Readout, head_states, score_actions
from slipstream.learner.parallel.context import context_of
from slipstream.learner.parallel.fsdp import reshard
from slipstream.learner.parallel.mesh import World
from slipstream.models.architecture import takes_images
from slipstream.models.folder import model_folder


@dataclass(frozen=True)
class Teacher:
    """A teacher, on every rank."""

    config: TeacherConfig
    model: nn.Module | None
    """None: an engine, whose values the trajectories have."""
    is_policy: bool = False
    """The model is the policy itself; its initial weights are those without adapters."""

    @property
    def is_average(self) -> bool:
        """True for a running average of the policy's weights."""
        return self.config.is_policy and self.config.weights == "average"

    @contextmanager
    def computing(self) -> Iterator[nn.Module]:
        """The model, with the weights of the teacher; for passes without gradients."""
        assert self.model is not None, "an engine has no model here"
        base = self.is_policy and self.config.weights != "present"
        with without_adapters(self.model) if base else nullcontext():
            yield self.model


@dataclass(frozen=True)
class Teachers:
    """All teachers of a run."""

    config: DistillConfig
    all: Sequence[Teacher]
    """In the order of the configuration."""
    policy: nn.Module
    temperature: float

    @property
    def averages(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """Running averages of the policy by name, for checkpoints, each with an optimizer that never moves it."""
        return {
            f"teacher_{number}": (teacher.model, torch.optim.SGD(teacher.model.parameters(), lr=0.0))
            for number, teacher in enumerate(self.all)
            if teacher.model is not None and teacher.is_average
        }

    def of_step(self, trajectories: Sequence[Trajectory], mask_BT: Tensor) -> "Teaching":
        """The teachers' part in a step.

        Args:
            trajectories: of the step's rows.
            mask_BT: 1.0 where there is an action.
        """
        chosen = [self._choose(trajectory) for trajectory in trajectories]
        taught_B = torch.tensor([number is not None for number in chosen], device=mask_BT.device)
        return Teaching(self, trajectories, chosen, mask_BT * taught_B[:, None])

    @torch.no_grad()
    def lesson(self, batch: MicroBatch) -> Lesson:
        """Distributions of the only teacher at all actions of this rank's share of a micro-batch; a collective."""
        (teacher,) = self.all
        share = batch.split(context_of(self.policy))
        with teacher.computing() as model:
            states = head_states(model, share)
            rule = LogitRule.of(model, temperature=self.temperature)
        return Lesson(torch.arange(share.actions, device=share.actions_S.device), HeadStates(*states, rule))

    def release(self) -> None:
        """Frees what teachers keep gathered for the policy's backward pass."""
        for teacher in self.all:
            if teacher.model is not None and not teacher.is_policy:
                reshard(teacher.model)

    @torch.no_grad()
    def follow(self) -> None:
        """Moves the running averages towards the policy's present weights, each rank its shards."""
        for teacher in self.all:
            if teacher.model is not None and teacher.is_average:
                for mean, present in zip(teacher.model.parameters(), self.policy.parameters(), strict=True):
                    if present.requires_grad:
                        _local(mean).lerp_(_local(present), teacher.config.average_rate)

    def readout(self, lessons: Sequence[Lesson], *, kept_bytes: int) -> Readout:
        """For `score_actions` of the policy: divergence and agreement of its actions, 0 for those without a lesson."""
        config = self.config
        assert config.loss != "advantage", "the log-probs of the actions are no distributions"
        comparison = Comparison(config.loss, config.beta, config.top_k, config.tail)
        rule = LogitRule.of(self.policy, temperature=self.temperature)

        def read(states_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
            divergence_A, agreed_A = (states_AD.new_zeros(len(states_AD), dtype=torch.float32) for _ in range(2))
            for lesson in lessons:
                found = policy_divergence(states_AD, weight_VD, bias_V, lesson, rule, comparison, kept_bytes=kept_bytes)
                divergence_A, agreed_A = (
                    values_A.index_put((lesson.actions_A,), new_A)
                    for values_A, new_A in zip((divergence_A, agreed_A), found, strict=True)
                )
            return torch.stack([divergence_A, agreed_A])

        return read

    def _choose(self, trajectory: Trajectory) -> int | None:
        """Index of the trajectory's teacher; None if it is not distilled."""
        label = next((name.removeprefix(MIXTURE) for name in trajectory.scores if name.startswith(MIXTURE)), None)
        config = self.config.of_env(label)
        if config is None:
            return None
        if config.context is not None and not trajectory.teacher_prompt:
            return None
        if config.url is not None and not self._has_scores(trajectory):
            return None
        return self.config.teachers.index(config)

    def _has_scores(self, trajectory: Trajectory) -> bool:
        """True if an engine has scored the trajectory; of groups from before a change of the settings none has."""
        scored, k = len(trajectory.teacher_logprobs), self.config.top_k
        return scored > 0 and (k is None or len(trajectory.teacher_top_ids) == scored * k)


@dataclass(frozen=True)
class Teaching:
    """The teacher of each row of a step, and its scores for one micro-batch at a time; on every rank."""

    teachers: Teachers
    trajectories: Sequence[Trajectory]
    chosen: Sequence[int | None]
    """Index of each row's teacher; None: it is not distilled."""
    mask_BT: Tensor
    """1.0 where an action is distilled."""

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """log π_T of a micro-batch's actions, 0 where it is not distilled, shape [B, T]; a collective."""
        logprobs_A = torch.zeros(batch.actions, device=batch.actions_S.device)
        for teacher, sequences, part in self._parts(batch):
            if teacher.model is None:
                given = b"".join(each.teacher_logprobs for each in self._of_batch(batch, sequences))
                values = np.frombuffer(given, dtype=LOGPROB_DTYPE).astype(np.float32)
                values_A = torch.from_numpy(values).to(logprobs_A.device)
            else:
                with teacher.computing() as model:
                    values_A = score_actions(model, part, temperature=self.teachers.temperature).logprobs_A
                if part is batch:
                    values_A = values_A.index_select(0, _actions_of(batch, sequences))
            if sequences:
                logprobs_A[_actions_of(batch, sequences)] = values_A
        return batch.padded(logprobs_A)

    @torch.no_grad()
    def lessons(self, batch: MicroBatch) -> list[Lesson]:
        """Distributions of the teachers at a micro-batch's actions, of this rank's share of it; a collective."""
        share, lessons = batch.split(context_of(self.teachers.policy)), list[Lesson]()
        for teacher, sequences, part in self._parts(batch):
            if teacher.model is None:
                given: HeadStates | TopTokens = self._of_engine(sequences, batch)
            else:
                with teacher.computing() as model:
                    states_AE, weight_VE, bias_V = head_states(model, part.split(context_of(model)))
                    rule = LogitRule.of(model, temperature=self.teachers.temperature)
                if part is batch:
                    states_AE = states_AE.index_select(0, _actions_of(share, sequences))
                given = HeadStates(states_AE, weight_VE, bias_V, rule)
            if sequences:
                lessons.append(Lesson(_actions_of(share, sequences), given))
        return lessons

    def _parts(self, batch: MicroBatch) -> Iterator[tuple[Teacher, list[int], MicroBatch]]:
        """Each teacher, what is passed through its model, and which sequences of the micro-batch that has, in order.

        Those with a model come on all ranks, if need be with a micro-batch without actions.
        """
        rows = batch.rows_B.tolist()
        for number, teacher in enumerate(self.teachers.all):
            mine = [index for index, row in enumerate(rows) if self.chosen[row] == number]
            if teacher.model is None or (len(mine) == len(rows) and teacher.config.context is None):
                yield teacher, mine, batch
            elif mine:
                sequences = [self._sequence(teacher, rows[index]) for index in mine]
                (part,) = pack(sequences, token_budget=sum(len(sequence.token_ids) for sequence in sequences))
                order = [mine[index] for index in part.rows_B.tolist()]
                yield teacher, order, part.to(batch.actions_S.device)
            else:
                yield teacher, [], empty_micro_batch().to(batch.actions_S.device)

    def _of_batch(self, batch: MicroBatch, sequences: Sequence[int]) -> list[Trajectory]:
        rows = batch.rows_B.tolist()
        return [self.trajectories[rows[index]] for index in sequences]

    def _sequence(self, teacher: Teacher, row: int) -> TokenSequence:
        """The row's tokens as the teacher sees them: with a context, behind its own prompt."""
        trajectory = self.trajectories[row]
        ids, mask = token_ids(trajectory), action_mask(trajectory)
        if teacher.config.context is None:
            return TokenSequence(ids, mask)
        prompt, start = np.frombuffer(trajectory.teacher_prompt, dtype=TOKEN_DTYPE), int(mask.argmax())
        no_action = np.zeros(len(prompt), dtype=mask.dtype)
        return TokenSequence(np.concatenate([prompt, ids[start:]]), np.concatenate([no_action, mask[start:]]))

    def _of_engine(self, sequences: Sequence[int], batch: MicroBatch) -> TopTokens:
        """An engine's likeliest tokens at the actions of these sequences, one after the other."""
        trajectories = self._of_batch(batch, sequences)
        k, device = self.teachers.config.top_k, batch.actions_S.device
        assert k is not None, "the configuration requires top_k of engines"
        ids, logprobs = (
            np.frombuffer(b"".join(each), dtype=dtype).reshape(-1, k)
            for each, dtype in (
                ([trajectory.teacher_top_ids for trajectory in trajectories], TOKEN_DTYPE),
                ([trajectory.teacher_top_logprobs for trajectory in trajectories], LOGPROB_DTYPE),
            )
        )
        return TopTokens(
            torch.from_numpy(ids.astype(np.int64)).to(device), torch.from_numpy(logprobs.astype(np.float32)).to(device)
        )


def _actions_of(batch: MicroBatch, sequences: Sequence[int]) -> Tensor:
    """Indices of the actions of these sequences, one sequence after the other, without targets of a cross-entropy."""
    places_A = torch.arange(batch.actions, device=batch.actions_S.device)
    of_sequence_A = batch.sequence_A
    if batch.is_target_A is not None:
        places_A, of_sequence_A = places_A[~batch.is_target_A], of_sequence_A[~batch.is_target_A]
    counts = torch.bincount(of_sequence_A, minlength=batch.rows_B.numel()).tolist()
    parts = places_A.split(counts)
    return torch.cat([places_A[:0], *(parts[index] for index in sequences)])


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def load_teachers(
    config: DistillConfig | None,
    model: nn.Module,
    policy: Path,
    options: ModelOptions,
    world: World,
    *,
    temperature: float,
) -> Teachers | None:
    """The configured teachers; None without distillation. A collective.

    Args:
        model: the policy.
        policy: folder of its initial weights.
        options: of models that nothing trains.

    Raises: ConfigError when a teacher can't be run, or has other tokens than the policy.
    """
    if config is None:
        return None
    several = len(config.teachers) > 1 or config.teachers[0].env is not None
    if takes_images(policy) and (several or any(teacher.context for teacher in config.teachers)):
        raise ConfigError(
            f"learner.distill.teachers: the policy in {policy} takes images; then there can be one teacher alone, "
            "without env and context"
        )
    teachers = []
    for number, teacher in enumerate(config.teachers):
        if teacher.url is not None:
            teachers.append(Teacher(teacher, None))
        elif teacher.model is not None:
            key = f"learner.distill.teachers.{number}.model"
            folder = model_folder(key, teacher.model)
            loaded = load_model(folder, replace(options, lora=None), world)
            require_same_tokens(key, folder, policy, vocabulary=vocabulary_of(loaded), world=world)
            teachers.append(Teacher(teacher, loaded.requires_grad_(False)))
        elif teacher.weights == "average":  # not frozen: a checkpoint holds what could be trained
            teachers.append(Teacher(teacher, load_model(policy, options, world)))
        elif teacher.weights == "present" or has_adapters(model):
            teachers.append(Teacher(teacher, model, is_policy=True))
        else:
            teachers.append(Teacher(teacher, load_model(policy, options, world).requires_grad_(False)))
    return Teachers(config, teachers, model, temperature)
