"""The policy's objective on one micro-batch: the sum of the streams.

# B rows (trajectories) of the micro-batch, T actions of the longest
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from slipstream.learner.algorithms.aggregation import Totals, aggregate
from slipstream.learner.algorithms.correction import Correction, correct, interpolate
from slipstream.learner.algorithms.divergence import kl_estimate
from slipstream.learner.algorithms.losses.base import LossInputs
from slipstream.learner.algorithms.losses.selective import top_entropy
from slipstream.learner.algorithms.prepare import PreparedStep
from slipstream.learner.algorithms.registry import Algorithm
from slipstream.learner.algorithms.streams import cross_entropy, distillation, stream_mean
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
    streams: Mapping[str, Tensor]
    """The micro-batch's part of each stream's loss, without its weight; empty where there is only `rl`."""
    distilled: "Distilled | None" = None


@dataclass(frozen=True)
class Distilled:
    """Distillation of a micro-batch's actions by teachers, detached; 0 where one is not distilled."""

    mask_BT: Tensor
    kl_BT: Tensor
    """Divergence from the teacher, or log π_θ - log π_T where only the actions' log-probs are known."""
    agreed_BT: Tensor | None
    """1.0 where policy and teacher hold the same token likeliest; None where that is not known."""


@dataclass(frozen=True)
class _Policies:
    """Values of a micro-batch's actions that all algorithms use."""

    target_BT: Tensor
    behaviour_BT: Tensor
    initial_BT: Tensor | None
    entropy_BT: Tensor | None
    kl_BT: Tensor | None


@dataclass(frozen=True)
class _PolicyLoss:
    """The policy loss of the rows of one algorithm; other rows are 0."""

    loss: Tensor
    """The micro-batch's part of the update's loss."""
    corrected: Correction
    clipped_BT: Tensor


@dataclass(frozen=True)
class Objective:
    """The objective of one optimizer update of the policy."""

    algorithms: Sequence[Algorithm]
    """Those of the envs, the learner's first."""
    horizon: int
    """Longest permitted answer, in tokens."""
    prepared: PreparedStep
    update: int
    """Index of the update within the step."""
    totals: Totals
    """Actions and trajectories in the policy loss of the whole update, on all ranks."""
    tokens: Mapping[str, float]
    """Tokens of each of the step's further streams in the whole update, on all ranks."""
    kl_coefficient: float
    generator: torch.Generator

    def __call__(
        self, scores: ActionScores, batch: MicroBatch, teacher_BT: Tensor | None = None
    ) -> tuple[Tensor, ActionValues]:
        """The micro-batch's share of the update's loss, with gradient, and values of its actions.

        Args:
            scores: with divergence and agreement, where teachers' distributions are distilled.
            teacher_BT: log π_T, where those of the actions are.
        """
        rows = self.prepared.rows
        target_BT = batch.padded(scores.logprobs_A)
        policies = _Policies(
            target_BT=target_BT,
            behaviour_BT=batch.of_step(rows.behaviour_logprobs_BT),
            initial_BT=self._initial(batch, target_BT.detach()),
            entropy_BT=None if scores.entropy_A is None else batch.padded(scores.entropy_A),
            kl_BT=self._reference_kl(batch, target_BT),
        )
        parts = [self._policy_loss(index, batch, policies) for index in range(len(self.algorithms))]
        weights = [each.learner.streams.rl for each in self.algorithms]
        loss = _sum(weight * part.loss for weight, part in zip(weights, parts, strict=True))
        importance_BT = _sum(part.corrected.importance_weights_BT for part in parts)
        streams: dict[str, Tensor] = {}
        if self.prepared.streams:
            streams["rl"] = _sum(part.loss.detach() for part in parts)
        for name in self.prepared.streams:
            if name == "ce":
                loss_BT = cross_entropy(target_BT)
            else:
                loss_BT = importance_BT * self._distillation(scores, batch, target_BT, teacher_BT)
            weighted, streams[name] = self._stream_loss(name, batch, loss_BT)
            loss = loss + weighted
        mask_BT, entropy_BT, kl_BT = batch.of_step(rows.mask_BT), policies.entropy_BT, policies.kl_BT
        return loss, ActionValues(
            target_BT=target_BT.detach(),
            behaviour_BT=policies.behaviour_BT,
            initial_BT=policies.initial_BT,
            versions_BT=batch.of_step(rows.versions_BT),
            mask_BT=mask_BT,
            kept_BT=_sum(part.corrected.mask_BT for part in parts),
            clipped_BT=_sum(part.clipped_BT for part in parts),
            truncated_BT=_sum(part.corrected.truncated_BT for part in parts),
            entropy_BT=None if entropy_BT is None else entropy_BT.detach(),
            reference_kl_BT=None if kl_BT is None else kl_BT.detach() * mask_BT,
            streams=streams,
            distilled=self._distilled(scores, batch, target_BT.detach(), teacher_BT),
        )

    def _policy_loss(self, index: int, batch: MicroBatch, policies: _Policies) -> _PolicyLoss:
        """The policy loss of the rows of one algorithm: with entropy bonus and KL penalty, weighted and aggregated."""
        algorithm, rows = self.algorithms[index], self.prepared.rows
        config, kl, entropy_BT = algorithm.learner.loss, algorithm.learner.kl, policies.entropy_BT
        proximal_BT = self._proximal(algorithm, batch, policies)
        corrected = self._correction(index, batch, proximal_BT)
        terms = algorithm.loss(
            LossInputs(
                logprobs_BT=policies.target_BT,
                proximal_logprobs_BT=proximal_BT,
                behaviour_logprobs_BT=policies.behaviour_BT,
                advantages_BT=batch.of_step(self.prepared.advantages_BT),
                mask_BT=corrected.mask_BT,
                generator=self.generator,
            )
        )
        loss_BT = corrected.importance_weights_BT * terms.loss_BT
        if config.top_entropy is not None:
            assert entropy_BT is not None, "top_entropy needs entropies"
            loss_BT = loss_BT * top_entropy(entropy_BT, corrected.mask_BT, config.top_entropy)
        if entropy_BT is not None and config.entropy_bonus:
            loss_BT = loss_BT - config.entropy_bonus * entropy_BT
        if policies.kl_BT is not None and kl is not None and kl.place == "loss":
            loss_BT = loss_BT + self.kl_coefficient * policies.kl_BT
        loss = aggregate(
            batch.of_step(rows.importance_weights_B[:, None]) * loss_BT,
            corrected.mask_BT,
            config.aggregation,
            # Of all envs: each has the share in the loss that its actions or answers have.
            self.totals,
            horizon=self.horizon,
            constant=config.constant,
        )
        return _PolicyLoss(loss, corrected, terms.clipped_BT)

    def _distillation(
        self, scores: ActionScores, batch: MicroBatch, target_BT: Tensor, teacher_BT: Tensor | None
    ) -> Tensor:
        """Losses of the actions in the stream `ref_kl`.

        Those of stale answers count by their truncated importance weight, as in SDPO (arXiv 2601.20802, `is_clip`).
        """
        if scores.further_RA is not None:
            return batch.padded(scores.further_RA[0])
        reference_BT = self.prepared.streams["ref_kl"].reference_logprobs_BT
        if teacher_BT is not None:
            return distillation(target_BT, teacher_BT)
        assert reference_BT is not None, "the stream ref_kl without teachers and reference"
        return distillation(target_BT, batch.of_step(reference_BT))

    def _stream_loss(self, name: str, batch: MicroBatch, loss_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The micro-batch's part of the loss of a stream beside `rl`: with the envs' weights, and without."""
        stream = self.prepared.streams[name]
        mask_BT, weights_B1 = batch.of_step(stream.mask_BT), batch.of_step(stream.weights_B1)
        loss_BT = batch.of_step(self.prepared.rows.importance_weights_B[:, None]) * loss_BT
        weighted, plain = (
            stream_mean(each_BT, mask_BT, self.tokens[name]) for each_BT in (weights_B1 * loss_BT, loss_BT.detach())
        )
        return weighted, plain

    def _distilled(
        self, scores: ActionScores, batch: MicroBatch, target_BT: Tensor, teacher_BT: Tensor | None
    ) -> Distilled | None:
        stream = self.prepared.streams.get("ref_kl")
        if stream is None or (teacher_BT is None and scores.further_RA is None):
            return None
        mask_BT = batch.of_step(stream.mask_BT)
        if teacher_BT is not None:
            return Distilled(mask_BT, (target_BT - teacher_BT) * mask_BT, None)
        assert scores.further_RA is not None
        divergence_BT, agreed_BT = (batch.padded(values_A.detach()) for values_A in scores.further_RA)
        return Distilled(mask_BT, divergence_BT * mask_BT, agreed_BT * mask_BT)

    def _initial(self, batch: MicroBatch, target_BT: Tensor) -> Tensor | None:
        if self.prepared.scored[self.update]:
            return batch.of_step(self.prepared.proximal_logprobs_BT)
        return target_BT if self.update == 0 else None

    def _proximal(self, algorithm: Algorithm, batch: MicroBatch, policies: _Policies) -> Tensor:
        """The anchor of the trust region."""
        match algorithm.learner.correction.proximal:
            case "recompute":
                assert policies.initial_BT is not None, "an update after the first was not scored"
                return policies.initial_BT
            case "interpolate":
                lag_BT = batch.of_step(self.prepared.lag_BT)
                return interpolate(policies.target_BT.detach(), policies.behaviour_BT, lag_BT)
            case "behaviour":
                return policies.behaviour_BT

    def _correction(self, index: int, batch: MicroBatch, proximal_BT: Tensor) -> Correction:
        """The correction of the rows of one algorithm."""
        rows, of_step, config = self.prepared.rows, self.prepared.correction, self.algorithms[index].learner.correction
        own_B1 = rows.own_B1(index)
        if config.needs_proximal_first:
            assert of_step is not None, "a correction of the whole step was not prepared"
            weights_BT, truncated_BT, mask_BT = (
                batch.of_step(each_BT if own_B1 is None else each_BT * own_B1)
                for each_BT in (of_step.importance_weights_BT, of_step.truncated_BT, of_step.mask_BT)
            )
            return Correction(weights_BT, truncated_BT, mask_BT, {})
        mask_BT = batch.of_step(rows.mask_BT if own_B1 is None else rows.mask_BT * own_B1)
        log_ratio_BT = proximal_BT - batch.of_step(rows.behaviour_logprobs_BT)
        # It depends on no other micro-batch: see needs_proximal_first.
        return correct(log_ratio_BT, mask_BT, config)

    def _reference_kl(self, batch: MicroBatch, target_BT: Tensor) -> Tensor | None:
        kl = self.algorithms[0].learner.kl
        if kl is None or self.prepared.reference_logprobs_BT is None:
            return None
        reference_BT, behaviour_BT = map(
            batch.of_step, (self.prepared.reference_logprobs_BT, self.prepared.rows.behaviour_logprobs_BT)
        )
        return kl_estimate(target_BT, reference_BT, kl.estimator, behaviour_BT)


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    """Their sum; that of one is itself."""
    return reduce(torch.add, tensors)
