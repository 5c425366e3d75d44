"""One training step: proximal log-probs, then an optimizer update for each mini-batch.

# A actions
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.configs import RunConfig
from slipstream.learner.distributed import World
from slipstream.learner.feed import StepData, Update
from slipstream.learner.losses import decoupled_ppo
from slipstream.learner.metrics import StepSums
from slipstream.learner.optim import learning_rate, set_learning_rate
from slipstream.learner.packing import MicroBatch, empty_micro_batch
from slipstream.learner.scoring import score_actions


@dataclass
class Trainer:
    """Model and optimizer, and what one step does to them; on every rank."""

    config: RunConfig
    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, data: StepData, *, own_version: int | None) -> StepSums:
        """Trains on one step's groups; a collective.

        Args:
            own_version: the policy version that the present weights were published as, None if they were not.
        """
        learner = self.config.learner
        lr = learning_rate(data.step, steps=learner.steps, config=learner.optimizer)
        set_learning_rate(self.optimizer, lr)
        sums = StepSums(self.world.device)
        updates = [self._aligned(update) for update in data.updates]
        # The proximal policy is the one before the first update. There the target's own log-probs are the proximal's,
        # so only the later updates' mini-batches need to be scored beforehand.
        proximal: list[list[Tensor | None]] = [[None] * len(updates[0])]
        proximal += [[self._score(batch) for batch in batches] for batches in updates[1:]]
        for batches, proximal_of_update in zip(updates, proximal, strict=True):
            self._update(batches, proximal_of_update, own_version, sums)
        sums.set("lr", lr)
        return sums

    def _update(
        self, batches: list[MicroBatch], proximal: list[Tensor | None], own_version: int | None, sums: StepSums
    ) -> None:
        mine = torch.tensor(float(sum(batch.actions for batch in batches)), device=self.world.device)
        actions = self.world.sum(mine).clamp(min=1.0)
        bonus = self.config.learner.loss.entropy_bonus
        self.optimizer.zero_grad(set_to_none=True)
        for batch, proximal_A in zip(batches, proximal, strict=True):
            scores = score_actions(self.model, batch, temperature=self._temperature, entropy=bonus > 0)
            target_A = scores.logprobs_A
            anchor_A = target_A.detach() if proximal_A is None else proximal_A
            terms = decoupled_ppo(
                target_A, anchor_A, batch.behaviour_logprobs_A, batch.advantages_A, self.config.learner.loss
            )
            loss = terms.loss_A.sum() / actions
            if scores.entropy_A is not None:
                loss = loss - bonus * scores.entropy_A.sum() / actions
                sums.add("entropy", scores.entropy_A.detach().sum())
            # FSDP averages gradients over the ranks; the loss is a mean over the actions of all of them.
            torch.autograd.backward(loss * self.world.size)
            sums.add_actions(batch, terms, target_A.detach(), anchor_A, own_version)
            sums.add("loss", loss.detach() / self.config.learner.updates_per_step)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.learner.optimizer.clip_norm)
        sums.set("grad_norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self.optimizer.step()

    @property
    def _temperature(self) -> float:
        return self.config.rollout.sampling.temperature

    @torch.no_grad()
    def _score(self, batch: MicroBatch) -> Tensor:
        return score_actions(self.model, batch, temperature=self._temperature).logprobs_A

    def _aligned(self, update: Update) -> list[MicroBatch]:
        """The update's micro-batches on the device, as many on every rank."""
        batches = [batch.to(self.world.device) for batch in update.micro_batches]
        if self.world.size > 1:
            counts = torch.zeros(self.world.size, device=self.world.device)
            counts[self.world.rank] = len(batches)
            most = int(self.world.sum(counts).max())
            batches += [empty_micro_batch().to(self.world.device) for _ in range(most - len(batches))]
        return batches
