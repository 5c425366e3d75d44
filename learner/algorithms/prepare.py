"""Preparation of a step before its first update: log-probs, values, advantages and returns of its actions.

# B rows (trajectories) of one rank's part of a step, T actions of the longest
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from slipstream.configs.schema.learner import LearnerConfig
from slipstream.learner.algorithms.advantages.base import AdvantageInputs, RewardTerms
from slipstream.learner.algorithms.advantages.group_relative import penalise_length
from slipstream.learner.algorithms.advantages.groups import Groups
from slipstream.learner.algorithms.advantages.returns import value_returns
from slipstream.learner.algorithms.correction import Correction, correct, lag_in_steps, merged
from slipstream.learner.algorithms.critic import Critic
from slipstream.learner.algorithms.divergence import kl_estimate
from slipstream.learner.algorithms.process_reward import ProcessRewardModel, ProcessScores
from slipstream.learner.algorithms.registry import Algorithm
from slipstream.learner.algorithms.streams import Stream
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.data.rows import ActionBatch
from slipstream.learner.models.lora import without_adapters
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.fsdp import reshard
from slipstream.learner.parallel.mesh import World


@dataclass(frozen=True)
class PreparedStep:
    """This rank's part of a step, on its device; 0 where there is no action."""

    rows: ActionBatch
    lag_BT: Tensor
    """Age of each action's weights in training steps; see `lag_in_steps`."""
    advantages_BT: Tensor
    proximal_logprobs_BT: Tensor
    """log π_prox where `scored`, else 0."""
    scored: tuple[bool, ...]
    """For each update, true if the proximal log-probs of its rows were computed. The first update does not need them:
    target and proximal policy are equal there."""
    correction: Correction | None
    """The correction; None if it is computed for each micro-batch, because it does not depend on the whole step."""
    streams: Mapping[str, Stream]
    """Streams beside `rl`, by name; the same on all ranks."""
    reference_logprobs_BT: Tensor | None
    values_BT: Tensor | None
    returns_BT: Tensor | None
    process: ProcessScores | None


@dataclass(frozen=True)
class StepPreparer:
    """Forward passes of policy, reference and critic over a step's micro-batches; collectives."""

    learner: LearnerConfig
    temperature: float
    """Sampling temperature."""
    term_weights: Sequence[float]
    """Weights of the reward terms that are trained on."""
    steps_per_version: int
    """Training steps between two published versions."""
    world: World
    algorithms: Sequence[Algorithm]
    """Those of the envs, the learner's first."""
    model: nn.Module
    reference: nn.Module | None
    """The policy itself where that has adapters: without them it is the reference."""
    critic: Critic | None
    process_reward: ProcessRewardModel | None

    @torch.no_grad()
    def __call__(
        self,
        rows: ActionBatch,
        updates: Sequence[Sequence[MicroBatch]],
        *,
        consuming_version: int,
        unpublished_steps: int,
        kl_coefficient: float,
        taught_BT: Tensor | None = None,
    ) -> PreparedStep:
        """Prepares the rows of all updates; the present weights are the proximal policy.

        Args:
            unpublished_steps: training steps since the consuming version was published.
            taught_BT: 1.0 at the actions that teachers score; None without teachers.
        """
        # In the first update the target policy is the proximal one; later updates need its log-probs as their anchor.
        anchored = any(each.learner.correction.proximal == "recompute" for each in self.algorithms)
        scored = tuple(self._needs_all_scores or (number > 0 and anchored) for number in range(len(updates)))
        to_score = [batch for batches, wanted in zip(updates, scored, strict=True) if wanted for batch in batches]
        proximal_BT, collision_BT = self._proximal(rows, to_score)
        batches = [*chain.from_iterable(updates)]
        reference_BT, values_BT = self._reference(rows, batches), self._values(rows, batches)
        process = self._process(rows, batches)
        inputs = AdvantageInputs(
            mask_BT=rows.by_episode(rows.mask_BT),
            rewards_BT=rows.by_episode(self._rewards(rows, proximal_BT, reference_BT, kl_coefficient)),
            groups=Groups(rows.group_E, rows.groups),
            terms=RewardTerms(rows.terms_KE, torch.tensor(self.term_weights, device=self.world.device)),
            greedy_rewards_B=rows.greedy_reward_E,
            values_BT=None if values_BT is None else rows.by_episode(values_BT),
            logprobs_BT=rows.by_episode(proximal_BT) if all(scored) else None,
            reference_logprobs_BT=None if reference_BT is None else rows.by_episode(reference_BT),
            process_rewards_BT=None if process is None else rows.by_episode(process.rewards_BT),
            collision_BT=None if collision_BT is None else rows.by_episode(collision_BT),
            turn_BT=None if rows.turn_BT is None else rows.by_episode(rows.turn_BT),
            state_BT=None if rows.state_BT is None else rows.by_episode(rows.state_BT),
            agent_BT=None if rows.agent_BT is None else rows.by_episode(rows.agent_BT),
            own_rewards_BT=None if rows.own_rewards_BT is None else rows.by_episode(rows.own_rewards_BT),
            total=self._total,
        )
        if self.learner.length_penalty is not None:
            inputs = penalise_length(inputs, self.learner.length_penalty)
        advantages_BT = rows.by_trajectory(self._advantages(rows, inputs))
        return PreparedStep(
            rows=rows,
            lag_BT=lag_in_steps(
                rows.versions_BT,
                consuming_version=consuming_version,
                steps_per_version=self.steps_per_version,
                unpublished_steps=unpublished_steps,
            ),
            advantages_BT=advantages_BT,
            proximal_logprobs_BT=proximal_BT,
            scored=scored,
            correction=self._correction(rows, proximal_BT, advantages_BT),
            streams=self._streams(rows, reference_BT, taught_BT),
            reference_logprobs_BT=reference_BT,
            values_BT=values_BT,
            returns_BT=self._returns(rows, inputs),
            process=process,
        )

    def _streams(self, rows: ActionBatch, reference_BT: Tensor | None, taught_BT: Tensor | None) -> dict[str, Stream]:
        """The streams beside `rl` that an env gives a weight."""
        weights, found = [each.learner.streams for each in self.algorithms], dict[str, Stream]()
        if any(each.ce for each in weights):
            assert rows.ce_mask_BT is not None, "the stream ce without targets"
            found["ce"] = self._stream(rows, rows.ce_mask_BT, [each.ce for each in weights])
        if any(each.ref_kl for each in weights):
            ref_kl = [each.ref_kl for each in weights]
            if taught_BT is not None:
                found["ref_kl"] = self._stream(rows, taught_BT, ref_kl)
            else:
                assert reference_BT is not None, "the stream ref_kl without a reference"
                found["ref_kl"] = self._stream(rows, rows.mask_BT, ref_kl, reference_BT)
        return found

    def _stream(
        self, rows: ActionBatch, mask_BT: Tensor, weights: Sequence[float], reference_BT: Tensor | None = None
    ) -> Stream:
        of_algorithm = torch.tensor(weights, device=self.world.device)
        weights_B = of_algorithm.expand(len(mask_BT)) if rows.algorithm_B is None else of_algorithm[rows.algorithm_B]
        return Stream(mask_BT * (weights_B > 0)[:, None], weights_B[:, None], reference_BT)

    def _total(self, values: Tensor) -> Tensor:
        """The sum over all ranks. The collective works in place, but advantages may use their argument again."""
        return self.world.sum(values.clone(memory_format=torch.contiguous_format))

    def _rewards(
        self, rows: ActionBatch, proximal_BT: Tensor, reference_BT: Tensor | None, kl_coefficient: float
    ) -> Tensor:
        """Rewards, less the KL penalty where `learner.kl.place` is `reward`."""
        kl = self.learner.kl
        if kl is None or kl.place != "reward" or reference_BT is None:
            return rows.rewards_BT
        return rows.rewards_BT - kl_coefficient * kl_estimate(proximal_BT, reference_BT, kl.estimator) * rows.mask_BT

    @property
    def _needs_all_scores(self) -> bool:
        kl = self.learner.kl
        needed = any(each.learner.advantage.needs_logprobs for each in self.algorithms)
        corrected = any(each.learner.correction.needs_proximal_first for each in self.algorithms)
        return corrected or (kl is not None and kl.place == "reward") or needed

    @property
    def _needs_collision(self) -> bool:
        return any(each.learner.advantage.needs_collision for each in self.algorithms)

    def _advantages(self, rows: ActionBatch, inputs: AdvantageInputs) -> Tensor:
        """Advantages of all episodes, each by the algorithm of its group; all algorithms run on all ranks."""
        if rows.algorithm_B is None:
            return self.algorithms[0].advantage(inputs)
        algorithm_E = rows.algorithm_B.new_zeros(rows.episodes).index_put((rows.episode_B,), rows.algorithm_B)
        advantages_EL = torch.zeros_like(inputs.mask_BT)
        for index, algorithm in enumerate(self.algorithms):
            own_E = algorithm_E == index
            advantages_EL[own_E] = algorithm.advantage(inputs.of_rows(own_E))
        return advantages_EL

    def _proximal(self, rows: ActionBatch, batches: Iterable[MicroBatch]) -> tuple[Tensor, Tensor | None]:
        collision_BT = torch.zeros_like(rows.mask_BT) if self._needs_collision else None

        def logprobs(batch: MicroBatch) -> Tensor:
            scores = score_actions(self.model, batch, temperature=self.temperature, collision=collision_BT is not None)
            if collision_BT is not None and scores.collision_A is not None:
                batch.put(collision_BT, scores.collision_A)
            return scores.logprobs_A

        return _score_all(rows, batches, logprobs), collision_BT

    def _reference(self, rows: ActionBatch, batches: Iterable[MicroBatch]) -> Tensor | None:
        if self.reference is None:
            return None
        score = partial(score_actions, self.reference, temperature=self.temperature)
        with without_adapters(self.reference) if self.reference is self.model else nullcontext():
            scored_BT = _score_all(rows, batches, lambda batch: score(batch).logprobs_A)
        reshard(self.reference)  # embedding and head, which are in no layer, stay gathered for a backward pass
        return scored_BT

    def _values(self, rows: ActionBatch, batches: Iterable[MicroBatch]) -> Tensor | None:
        if self.critic is None:
            return None
        return _score_all(rows, batches, self.critic.values)

    def _process(self, rows: ActionBatch, batches: Iterable[MicroBatch]) -> ProcessScores | None:
        if self.process_reward is None:
            return None
        scores = ProcessScores(torch.zeros_like(rows.mask_BT), torch.zeros_like(rows.mask_BT))
        for batch in batches:
            rewards_A, reference_A = self.process_reward.score(batch)
            batch.put(scores.rewards_BT, rewards_A)
            batch.put(scores.reference_BT, reference_A)
        return scores

    def _returns(self, rows: ActionBatch, inputs: AdvantageInputs) -> Tensor | None:
        if self.critic is None:
            return None
        gamma = self.learner.advantage.arguments["gamma"]
        return rows.by_trajectory(value_returns(inputs, gamma=gamma, lam=self.critic.config.lam))

    def _correction(self, rows: ActionBatch, proximal_BT: Tensor, advantages_BT: Tensor) -> Correction | None:
        """The corrections that depend on the whole step; rows of other ones are as if there was none."""
        first = [
            (index, each) for index, each in enumerate(self.algorithms) if each.learner.correction.needs_proximal_first
        ]
        if not first:
            return None
        log_ratio_BT = proximal_BT - rows.behaviour_logprobs_BT
        found, others_BT = list[Correction](), rows.mask_BT
        for index, algorithm in first:
            own_B1 = rows.own_B1(index)
            mask_BT = rows.mask_BT if own_B1 is None else rows.mask_BT * own_B1
            others_BT = others_BT - mask_BT
            config = algorithm.learner.correction
            found.append(correct(log_ratio_BT, mask_BT, config, self.world.sum, advantages_BT))
        return found[0] if rows.algorithm_B is None else merged(found, others_BT)


def _score_all(rows: ActionBatch, batches: Iterable[MicroBatch], score: Callable[[MicroBatch], Tensor]) -> Tensor:
    """Scores of the batches' actions, shape [B, T]; 0 elsewhere."""
    scored_BT = torch.zeros_like(rows.mask_BT)
    for batch in batches:
        batch.put(scored_BT, score(batch))
    return scored_BT
