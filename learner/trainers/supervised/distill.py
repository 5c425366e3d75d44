"""Offline distillation: the policy learns a teacher's distributions at the assistant's tokens of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.configs import RunConfig
from slipstream.learner.algorithms.teachers import Teachers, load_teachers
from slipstream.learner.data.examples import Example, Packed
from slipstream.learner.models.load import ModelOptions
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.trainers.setup import RankSetup, SingleModel
from slipstream.learner.trainers.supervised.base import LossSums
from slipstream.learner.trainers.supervised.sft import SftTrainer


@dataclass(kw_only=True)
class DistillTrainer(SftTrainer):
    """One rank of an offline distillation."""

    teachers: Teachers

    @classmethod
    def problems(cls, config: RunConfig) -> Sequence[str]:
        """Reasons why a run can't be started."""
        learner, problems = config.learner, list(super().problems(config))
        if learner.distill is None or not learner.streams.ref_kl:
            problems.append("learner.trainer: distill needs learner.distill and a weight, learner.streams.ref_kl")
            return problems
        (teacher, *others) = learner.distill.teachers
        if others or teacher.model is None or teacher.env is not None or teacher.context is not None:
            problems.append("learner.distill.teachers: with learner.trainer=distill there is one, a model for all rows")
        if not learner.distill.over_vocabulary:
            problems.append(
                "learner.distill.loss: advantage is for answers of the policy itself; with learner.trainer=distill "
                "take forward_kl, reverse_kl or jsd"
            )
        return problems

    @classmethod
    def parts(cls, setup: RankSetup, policy: SingleModel) -> dict[str, Any]:
        """The teacher, beside the parts of `sft`. Raises: ConfigError when it can't be run, or has other tokens."""
        config = setup.config
        options = ModelOptions.of(config.model, config.learner)
        distill, path = config.learner.distill, setup.initial_model
        teachers = load_teachers(distill, policy.model, path, options, setup.world, temperature=1.0)
        return {**super().parts(setup, policy), "teachers": teachers}

    def loss(self, packed: Packed[Example]) -> LossSums:
        """Divergence and cross-entropy with their weights, summed over the targets."""
        learner = self.config.learner
        readout = self.teachers.readout([self.teachers.lesson(packed.batch)], kept_bytes=learner.logits_bytes)
        scores = score_actions(
            self.policy.model,
            packed.batch,
            temperature=1.0,
            whole_vocabulary=True,
            kept_bytes=learner.logits_bytes,
            readout=readout,
        )
        assert scores.further_RA is not None, "the readout gives divergence and agreement"
        divergence, agreed = scores.further_RA.sum(-1)
        cross_entropy = -scores.logprobs_A.sum()
        loss = learner.streams.ref_kl * divergence + learner.streams.ce * cross_entropy
        metrics = {"distill/kl": divergence, "distill/agreement": agreed, "ce_loss": cross_entropy}
        return LossSums(loss, {name: value.detach() for name, value in metrics.items()})
