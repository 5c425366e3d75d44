"""The policy's objective on one micro-batch: loss, entropy bonus and KL penalty, weighed and aggregated.

# B rows (answers) of the micro-batch, T actions of the longest
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.configs import RunConfig
from slipstream.learner.algorithms.aggregation import Totals, aggregate
from slipstream.learner.algorithms.correction.apply import correct
from slipstream.learner.algorithms.correction.proximal import interpolate
from slipstream.learner.algorithms.kl import kl_estimate
from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms
from slipstream.learner.algorithms.prepare import Prepared
from slipstream.learner.algorithms.scoring import ActionScores
from slipstream.learner.data.packing import MicroBatch


@dataclass(frozen=True)
class Outcome:
    """What the objective made of a micro-batch; all but `loss` detached, 0 where there is no action."""

    loss: Tensor
    """This micro-batch's share of the update's loss, with gradient."""
    target_BT: Tensor
    """log π_θ."""
    behaviour_BT: Tensor
    """log μ."""
    own_BT: Tensor | None
    """log of the policy at the step's first weights, where it is known."""
    versions_BT: Tensor
    mask_BT: Tensor
    """1.0 where there is an action."""
    kept_BT: Tensor
    """1.0 where the correction leaves an action in the loss."""
    clipped_BT: Tensor
    """1.0 where the trust region stopped the gradient."""
    truncated_BT: Tensor
    """1.0 where the behaviour weight was capped or put to 0."""
    entropy_BT: Tensor | None
    reference_kl_BT: Tensor | None
    """Estimates of KL(π_θ‖π_ref), if there is a reference."""


@dataclass(frozen=True)
class Objective:
    """What one update of the policy descends."""

    config: RunConfig
    loss: Callable[[LossInputs], LossTerms]
    prepared: Prepared
    update: int
    """Which of the step's updates it is."""
    totals: Totals
    """Actions and answers in the loss of the whole update, on all ranks."""
    kl_coefficient: float
    generator: torch.Generator

    def __call__(self, scores: ActionScores, batch: MicroBatch) -> Outcome:
        """The micro-batch's share of the update's loss."""
        rows = self.prepared.rows
        mask_BT = batch.of_step(rows.mask_BT)
        behaviour_BT = batch.of_step(rows.behaviour_logprobs_BT)
        target_BT = batch.padded(scores.logprobs_A)
        own_BT = self._own(batch, target_BT.detach())
        proximal_BT = self._proximal(batch, own_BT, target_BT.detach())
        weights_BT, kept_BT, truncated_BT = self._correction(batch, proximal_BT)
        terms = self.loss(
            LossInputs(
                logprobs_BT=target_BT,
                proximal_logprobs_BT=proximal_BT,
                behaviour_logprobs_BT=behaviour_BT,
                advantages_BT=batch.of_step(self.prepared.advantages_BT),
                mask_BT=kept_BT,
                generator=self.generator,
            )
        )
        loss_BT = weights_BT * terms.loss_BT
        entropy_BT = None if scores.entropy_A is None else batch.padded(scores.entropy_A)
        if entropy_BT is not None:
            loss_BT = loss_BT - self.config.learner.loss.entropy_bonus * entropy_BT
        kl_BT = self._reference_kl(batch, target_BT)
        kl = self.config.learner.kl
        if kl_BT is not None and kl is not None and kl.place == "loss":
            loss_BT = loss_BT + self.kl_coefficient * kl_BT
        return Outcome(
            loss=self._aggregate(batch.of_step(rows.importance_weights_B[:, None]) * loss_BT, kept_BT),
            target_BT=target_BT.detach(),
            behaviour_BT=behaviour_BT,
            own_BT=own_BT,
            versions_BT=batch.of_step(rows.versions_BT),
            mask_BT=mask_BT,
            kept_BT=kept_BT,
            clipped_BT=terms.clipped_BT,
            truncated_BT=truncated_BT,
            entropy_BT=None if entropy_BT is None else entropy_BT.detach(),
            reference_kl_BT=None if kl_BT is None else kl_BT.detach() * mask_BT,
        )

    def _own(self, batch: MicroBatch, target_BT: Tensor) -> Tensor | None:
        if self.prepared.scored[self.update]:
            return batch.of_step(self.prepared.proximal_logprobs_BT)
        return target_BT if self.update == 0 else None

    def _proximal(self, batch: MicroBatch, own_BT: Tensor | None, target_BT: Tensor) -> Tensor:
        """The anchor of the trust region."""
        behaviour_BT = batch.of_step(self.prepared.rows.behaviour_logprobs_BT)
        match self.config.learner.correction.proximal:
            case "recompute":
                assert own_BT is not None, "an update after the first was not scored"
                return own_BT
            case "interpolate":
                return interpolate(
                    target_BT,
                    behaviour_BT,
                    batch.of_step(self.prepared.rows.versions_BT),
                    consuming_version=self.prepared.consuming_version,
                )
            case "behaviour":
                return behaviour_BT

    def _correction(self, batch: MicroBatch, proximal_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Behaviour weights, what is kept, and what was truncated."""
        whole = self.prepared.correction
        if whole is not None:
            return batch.of_step(whole.weights_BT), batch.of_step(whole.mask_BT), batch.of_step(whole.truncated_BT)
        rows = self.prepared.rows
        log_ratio_BT = proximal_BT - batch.of_step(rows.behaviour_logprobs_BT)
        # Nothing in it depends on other answers: see needs_proximal_first.
        own = correct(log_ratio_BT, batch.of_step(rows.mask_BT), self.config.learner.correction)
        return own.weights_BT, own.mask_BT, own.truncated_BT

    def _reference_kl(self, batch: MicroBatch, target_BT: Tensor) -> Tensor | None:
        kl = self.config.learner.kl
        if kl is None or self.prepared.reference_logprobs_BT is None:
            return None
        return kl_estimate(target_BT, batch.of_step(self.prepared.reference_logprobs_BT), kl.estimator)

    def _aggregate(self, values_BT: Tensor, mask_BT: Tensor) -> Tensor:
        loss = self.config.learner.loss
        return aggregate(
            values_BT,
            mask_BT,
            loss.aggregation,
            self.totals,
            horizon=self.config.rollout.sampling.max_tokens,
            constant=loss.constant,
        )
