"""The policy's objective on one micro-batch: loss, entropy bonus and KL penalty, weighted and aggregated.

# B rows (trajectories) of the micro-batch, T actions of the longest
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.configs.schema.distill import DistillConfig
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.learner.algorithms.aggregation import Totals, aggregate
from slipstream.learner.algorithms.correction import correct, interpolate
from slipstream.learner.algorithms.distillation import distillation_advantage
from slipstream.learner.algorithms.divergence import kl_estimate
from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms
from slipstream.learner.algorithms.losses.selective import top_entropy
from slipstream.learner.algorithms.prepare import PreparedStep
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.models.fused_head import ActionScores


@dataclass(frozen=True)
class ActionValues:
    """Values of a micro-batch's actions, for metrics: detached, 0 where there is no action."""

    target_BT: Tensor
    """log π_θ."""
    behaviour_BT: Tensor
    """log μ."""
    initial_BT: Tensor | None
    """log π of the weights at the start of the step; None where it was not computed."""
    versions_BT: Tensor
    mask_BT: Tensor
    """1.0 where there is an action."""
    kept_BT: Tensor
    """1.0 where an action is in the loss: not rejected by the correction."""
    clipped_BT: Tensor
    """1.0 where the trust region stopped the gradient."""
    truncated_BT: Tensor
    """1.0 where the importance weight was capped, or set to 0 by the band."""
    entropy_BT: Tensor | None
    reference_kl_BT: Tensor | None
    """Estimates of KL(π_θ‖π_ref), if there is a reference."""
    distilled: "Distilled | None" = None


@dataclass(frozen=True)
class Distilled:
    """Distillation of a micro-batch's actions, detached; 0 where one is not distilled."""

    mask_BT: Tensor
    kl_BT: Tensor
    """Divergence from the teacher, or log π_θ - log π_T where only the actions' log-probs are known."""
    agreed_BT: Tensor | None
    """1.0 where policy and teacher hold the same token likeliest; None where that is not known."""


@dataclass(frozen=True)
class Distillation:
    """The part of teachers in the objective of an update."""

    config: DistillConfig
    mask_BT: Tensor
    """1.0 where an action of the step is distilled, and not rejected by the correction of the step."""
    totals: Totals
    """Of these, over the whole update on all ranks."""


@dataclass(frozen=True)
class Objective:
    """The objective of one optimizer update of the policy."""

    learner: LearnerConfig
    horizon: int
    """Longest permitted answer, in tokens."""
    loss: Callable[[LossInputs], LossTerms]
    prepared: PreparedStep
    update: int
    """Index of the update within the step."""
    totals: Totals
    """Actions and trajectories in the loss of the whole update, on all ranks."""
    kl_coefficient: float
    generator: torch.Generator
    distillation: Distillation | None = None

    def __call__(
        self, scores: ActionScores, batch: MicroBatch, teacher_BT: Tensor | None = None
    ) -> tuple[Tensor, ActionValues]:
        """The micro-batch's share of the update's loss, with gradient, and values of its actions.

        Args:
            scores: with divergence and agreement, if distributions are distilled.
            teacher_BT: log π_T, if advantages are.
        """
        rows = self.prepared.rows
        mask_BT = batch.of_step(rows.mask_BT)
        behaviour_BT = batch.of_step(rows.behaviour_logprobs_BT)
        target_BT = batch.padded(scores.logprobs_A)
        initial_BT = self._initial(batch, target_BT.detach())
        proximal_BT = self._proximal(batch, initial_BT, target_BT.detach())
        importance_weights_BT, kept_BT, truncated_BT = self._correction(batch, proximal_BT)
        advantages_BT = batch.of_step(self.prepared.advantages_BT)
        distilled = self._distilled(scores, batch, target_BT.detach(), teacher_BT)
        if self.distillation is not None and teacher_BT is not None and distilled is not None:
            gap_BT = distillation_advantage(teacher_BT, target_BT) * distilled.mask_BT
            advantages_BT = advantages_BT + self.distillation.config.weight * gap_BT
        terms = self.loss(
            LossInputs(
                logprobs_BT=target_BT,
                proximal_logprobs_BT=proximal_BT,
                behaviour_logprobs_BT=behaviour_BT,
                advantages_BT=advantages_BT,
                mask_BT=kept_BT,
                generator=self.generator,
            )
        )
        loss_BT = importance_weights_BT * terms.loss_BT
        entropy_BT = None if scores.entropy_A is None else batch.padded(scores.entropy_A)
        if self.learner.loss.top_entropy is not None:
            assert entropy_BT is not None, "top_entropy needs entropies"
            loss_BT = loss_BT * top_entropy(entropy_BT, kept_BT, self.learner.loss.top_entropy)
        if entropy_BT is not None and self.learner.loss.entropy_bonus:
            loss_BT = loss_BT - self.learner.loss.entropy_bonus * entropy_BT
        kl_BT = self._reference_kl(batch, target_BT)
        kl = self.learner.kl
        if kl_BT is not None and kl is not None and kl.place == "loss":
            loss_BT = loss_BT + self.kl_coefficient * kl_BT
        row_weights_B1 = batch.of_step(rows.importance_weights_B[:, None])
        loss = self._aggregate(row_weights_B1 * loss_BT, kept_BT)
        if self.distillation is not None and scores.further_RA is not None:
            divergence_BT = row_weights_B1 * importance_weights_BT * batch.padded(scores.further_RA[0])
            loss = loss + self._divergence_loss(self.distillation, batch, divergence_BT, kept_BT)
        return loss, ActionValues(
            target_BT=target_BT.detach(),
            behaviour_BT=behaviour_BT,
            initial_BT=initial_BT,
            versions_BT=batch.of_step(rows.versions_BT),
            mask_BT=mask_BT,
            kept_BT=kept_BT,
            clipped_BT=terms.clipped_BT,
            truncated_BT=truncated_BT,
            entropy_BT=None if entropy_BT is None else entropy_BT.detach(),
            reference_kl_BT=None if kl_BT is None else kl_BT.detach() * mask_BT,
            distilled=distilled,
        )

    @staticmethod
    def _divergence_loss(distillation: Distillation, batch: MicroBatch, weighted_BT: Tensor, kept_BT: Tensor) -> Tensor:
        """The micro-batch's share of the mean divergence over the distilled actions of the update.

        Args:
            weighted_BT: divergences; those of stale answers times their truncated importance weight, as in SDPO (arXiv
                2601.20802, `is_clip`).
        """
        mask_BT = batch.of_step(distillation.mask_BT) * kept_BT
        terms_BT = distillation.config.weight * weighted_BT
        return aggregate(terms_BT, mask_BT, "token-mean", distillation.totals, horizon=1, constant=None)

    def _distilled(
        self, scores: ActionScores, batch: MicroBatch, target_BT: Tensor, teacher_BT: Tensor | None
    ) -> Distilled | None:
        if self.distillation is None:
            return None
        mask_BT = batch.of_step(self.distillation.mask_BT)
        if teacher_BT is not None:
            return Distilled(mask_BT, (target_BT - teacher_BT) * mask_BT, None)
        assert scores.further_RA is not None, "distributions are distilled, but the readout is missing"
        divergence_BT, agreed_BT = (batch.padded(values_A.detach()) for values_A in scores.further_RA)
        return Distilled(mask_BT, divergence_BT * mask_BT, agreed_BT * mask_BT)

    def _initial(self, batch: MicroBatch, target_BT: Tensor) -> Tensor | None:
        if self.prepared.scored[self.update]:
            return batch.of_step(self.prepared.proximal_logprobs_BT)
        return target_BT if self.update == 0 else None

    def _proximal(self, batch: MicroBatch, initial_BT: Tensor | None, target_BT: Tensor) -> Tensor:
        """The anchor of the trust region."""
        behaviour_BT = batch.of_step(self.prepared.rows.behaviour_logprobs_BT)
        match self.learner.correction.proximal:
            case "recompute":
                assert initial_BT is not None, "an update after the first was not scored"
                return initial_BT
            case "interpolate":
                return interpolate(target_BT, behaviour_BT, batch.of_step(self.prepared.lag_BT))
            case "behaviour":
                return behaviour_BT

    def _correction(self, batch: MicroBatch, proximal_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Importance weights, mask of the kept actions, and marks of the truncated weights."""
        of_step = self.prepared.correction
        if of_step is not None:
            return (
                batch.of_step(of_step.importance_weights_BT),
                batch.of_step(of_step.mask_BT),
                batch.of_step(of_step.truncated_BT),
            )
        rows = self.prepared.rows
        log_ratio_BT = proximal_BT - batch.of_step(rows.behaviour_logprobs_BT)
        # It depends on no other micro-batch: see needs_proximal_first.
        corrected = correct(log_ratio_BT, batch.of_step(rows.mask_BT), self.learner.correction)
        return corrected.importance_weights_BT, corrected.mask_BT, corrected.truncated_BT

    def _reference_kl(self, batch: MicroBatch, target_BT: Tensor) -> Tensor | None:
        kl = self.learner.kl
        if kl is None or self.prepared.reference_logprobs_BT is None:
            return None
        reference_BT, behaviour_BT = map(
            batch.of_step, (self.prepared.reference_logprobs_BT, self.prepared.rows.behaviour_logprobs_BT)
        )
        return kl_estimate(target_BT, reference_BT, kl.estimator, behaviour_BT)

    def _aggregate(self, values_BT: Tensor, mask_BT: Tensor) -> Tensor:
        loss = self.learner.loss
        return aggregate(
            values_BT,
            mask_BT,
            loss.aggregation,
            self.totals,
            horizon=self.horizon,
            constant=loss.constant,
        )
