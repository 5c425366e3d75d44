"""The implicit process reward model of PRIME: a language model whose log-ratio to its initial weights is a reward.

Its loss needs only the answers' outcomes, and yet it has a reward for each token. It is trained online, on the answers
of each step, with an optimizer of its own, and sharded like the policy.

# B rows (trajectories), T actions of the longest, A actions of a micro-batch
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from slipstream.configs.schema.learner import ProcessRewardConfig
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.data.rows import ActionBatch
from slipstream.learner.models.flops import ModelFlops
from slipstream.learner.models.identity import require_same_tokens
from slipstream.learner.models.load import ModelOptions, load_model, vocabulary_of
from slipstream.learner.models.lora import has_adapters, without_adapters
from slipstream.learner.models.optim import build_optimizer
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.fsdp import reshard
from slipstream.learner.parallel.mesh import World
from slipstream.models.folder import model_folder


@dataclass(frozen=True)
class ProcessScores:
    """Of a step's actions before its first update; 0 where there is none."""

    rewards_BT: Tensor
    """β log(π_φ/π_ref)."""
    reference_BT: Tensor
    """log π_ref."""


@dataclass(frozen=True)
class ProcessLoss:
    """A micro-batch's part of the loss, and sums over its trajectories."""

    loss: Tensor
    """With gradient; the sum over micro-batches and ranks is the update's loss."""
    answers: Tensor
    """Number of trajectories."""
    right: Tensor
    """Trajectories on the outcome's side: reward above 0 where the outcome is above ½, else not above 0."""
    reward: Tensor
    """Sum of the trajectories' rewards."""


@dataclass(frozen=True)
class ProcessRewardModel:
    """π_φ, its frozen reference π_ref and its optimizer, on every rank."""

    config: ProcessRewardConfig
    model: nn.Module
    reference: nn.Module
    """Its initial weights: the model itself, where that has adapters."""
    optimizer: torch.optim.Optimizer

    @property
    def flops(self) -> ModelFlops:
        """Operations of a forward and backward pass of π_φ."""
        return ModelFlops.of_model(self.model)

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """β log(π_φ/π_ref) and log π_ref of a micro-batch's actions, each of shape [A]; collectives."""
        with without_adapters(self.reference) if self.reference is self.model else nullcontext():
            reference_A = self._logprobs(self.reference, batch)
        reshard(self.reference)  # embedding and head, which are in no layer, stay gathered for a backward pass
        return self.config.beta * (self._logprobs(self.model, batch) - reference_A), reference_A

    def loss(
        self, batch: MicroBatch, rows: ActionBatch, scores: ProcessScores, *, answers: float, kept_bytes: int
    ) -> ProcessLoss:
        """Mean `cross_entropy` over the update's trajectories, of the rewards of their episodes.

        Args:
            rows: those of the step.
            scores: of the step.
            answers: trajectories of the whole update, on all ranks.
            kept_bytes: as `score_actions`.
        """
        logprobs_A = self._logprobs(self.model, batch, kept_bytes=kept_bytes)
        mask_BT = batch.of_step(rows.mask_BT)
        ratios_BT = (batch.padded(logprobs_A) - batch.of_step(scores.reference_BT)) * mask_BT
        reward_B = self.config.beta * ratios_BT.sum(-1)
        outcome_B, weight_B = rows.reward_E[rows.episode_B][batch.rows_B], rows.importance_weights_B[batch.rows_B]
        counted_B = (mask_BT.sum(-1) > 0).to(reward_B.dtype)
        return ProcessLoss(
            loss=(weight_B * counted_B * cross_entropy(reward_B, outcome_B)).sum() / max(answers, 1.0),
            answers=counted_B.sum(),
            right=(counted_B * ((reward_B > 0) == (outcome_B > 0.5))).sum(),
            reward=(counted_B * reward_B.detach()).sum(),
        )

    def _logprobs(self, model: nn.Module, batch: MicroBatch, kept_bytes: int = 0) -> Tensor:
        # At temperature 1 and over all tokens, whatever top-k left: nothing is sampled from this model.
        whole = replace(batch, kept_2K=None)
        return score_actions(model, whole, temperature=1.0, kept_bytes=kept_bytes).logprobs_A


def cross_entropy(reward_B: Tensor, outcome_B: Tensor) -> Tensor:
    """-o·log p - (1 - o)·log(1 - p) of p = sigmoid(r), shape [B].

    Args:
        reward_B: r = Σ_t β log(π_φ/π_ref) of each answer.
        outcome_B: o, limited to 0..1.

    Source: Cui et al. 2025 (PRIME), arXiv 2502.01456; Yuan et al. 2024, arXiv 2412.01981; their code, loss type `ce`.
    """
    return binary_cross_entropy_with_logits(reward_B, outcome_B.clamp(0, 1), reduction="none")


def load_process_reward(
    config: ProcessRewardConfig | None, policy: Path, options: ModelOptions, world: World
) -> ProcessRewardModel | None:
    """The configured model; it starts from `learner.process_reward.path`, or from the policy's weights. None: no model.

    Raises: ConfigError when it can't be trained, or has other tokens than the policy.
    """
    if config is None:
        return None
    folder = policy if config.path is None else model_folder("learner.process_reward.path", config.path)
    model = load_model(folder, options, world)
    if config.path is not None:
        known = vocabulary_of(model)
        require_same_tokens("learner.process_reward.path", folder, policy, vocabulary=known, world=world)
    reference = model
    if not has_adapters(model):
        reference = load_model(folder, replace(options, lora=None), world).requires_grad_(False)
    return ProcessRewardModel(config, model, reference, build_optimizer(model, config.optimizer))
