"""A training run at a forced lag: the real learner, on groups that its own model generates.

# N prefixes, L tokens of each, V vocabulary
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from benchmarks.staleness_report import Curves
from benchmarks.workers import serve
from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.wire.messages import TRAIN, Group, VersionSpan
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.logging import configure_logging
from slipstream.configs.runtime.network import use_loopback_interface
from slipstream.env.registry import build_env
from slipstream.learner.data.buffer_feed import build_step, partition_groups
from slipstream.learner.parallel.mesh import join_world, leave_world
from slipstream.learner.throttle import Throttle
from slipstream.learner.trainers.rl.parts import build_train_step
from slipstream.learner.trainers.rl.step import TrainStep
from slipstream.models.folder import initial_model
from slipstream.models.tokenizer import Tokenizer
from slipstream.rewards.base import Failure, Score
from slipstream.rewards.compose import weighted
from slipstream.rewards.registry import find_rewards
from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.rollouts.base import Prompt, answered

KEPT_METRICS = ("ess", "kl_k3", "clip_fraction", "truncated_fraction", "grad_norm", "lr")


def train(config: RunConfig) -> Curves:
    """Trains with a lag of `buffer.max_staleness` steps between generation and training."""
    started = time.monotonic()
    use_loopback_interface(config.weights.bind)
    torch.manual_seed(config.run.seed)
    path = initial_model(config)
    world = join_world()
    try:
        train_step = build_train_step(config, path, world)
        curves = _run(train_step, config.buffer.max_staleness, Sampler(config, train_step.model, path).groups)
    finally:
        leave_world()
    curves.seconds = time.monotonic() - started
    return curves


def _run(train_step: TrainStep, lag: int, generate: Callable[[int], Sequence[Group]]) -> Curves:
    learner, curves = train_step.learner, Curves()
    throttle = None if learner.throttle is None else Throttle(learner.throttle, lag)
    queue = DelayQueue(generate)
    for step in range(learner.steps):
        groups = queue.take(step, lag=lag)
        assigned = partition_groups(len(groups), updates=learner.updates_per_step, rank=0, world_size=1)
        weighted_groups = [[(groups[index], 1.0) for index in indices] for indices in assigned]
        data = build_step(
            weighted_groups,
            algorithms=train_step.algorithms,
            rewards=train_step.rewards,
            step=step,
            consuming_version=step,
        )
        metrics = train_step.run(data, unpublished_steps=0)
        curves.rewards.append(_mean_reward(queue.newest))
        curves.lags.append(lag)
        for name in KEPT_METRICS:
            curves.figures.setdefault(name, []).append(metrics[name])
        action = None if throttle is None else throttle.observe(metrics)
        if action is not None:
            lag, train_step.lr_scale = action.max_staleness, action.lr_scale
    curves.rewards.append(_mean_reward(generate(learner.steps)))
    return curves


def _mean_reward(groups: Sequence[Group]) -> float:
    return fmean(trajectory.reward for group in groups for trajectory in group.trajectories)


class DelayQueue:
    """Delays each version's groups by `lag` versions.

    The first `lag` steps train on groups of the initial weights. When the lag falls, the oldest groups are dropped, as
    the buffer expires groups beyond its limit; when it rises, one more version is generated at once.
    """

    def __init__(self, generate: Callable[[int], Sequence[Group]]) -> None:
        self._generate = generate
        self._waiting: deque[Sequence[Group]] = deque()
        self.newest: Sequence[Group] = ()
        """The groups that were generated last."""
        self.dropped = 0
        """Number of groups that were dropped because the lag fell."""

    def take(self, version: int, *, lag: int) -> Sequence[Group]:
        """The groups to train on at `version`, that of the present weights; to be called for each version in turn."""
        while len(self._waiting) > lag:
            self.dropped += len(self._waiting.popleft())
        while len(self._waiting) <= lag:
            self.newest = self._generate(version)
            self._waiting.append(self.newest)
        return self._waiting.popleft()


class Sampler:
    """Groups from the learner's own model, for tasks in the buffer's order; log μ is exact.

    For envs whose prompts all have one length; all answers have `rollout.sampling.max_tokens` tokens.
    """

    def __init__(self, config: RunConfig, model: nn.Module, path: Path) -> None:
        self._config = config
        self._model = model
        self._text = Tokenizer(path)
        self._env = build_env(config.env)
        self._rewards = find_rewards(config.rewards)
        self._random = torch.Generator().manual_seed(config.run.seed)
        self._issued = 0

    def groups(self, version: int) -> list[Group]:
        """The next step's groups, from the model's present weights, which are of `version`."""
        tasks = self._env.size("train")
        places = [divmod(self._issued + number, tasks) for number in range(self._config.learner.groups_per_step)]
        indices = [int(task_order(tasks, seed=self._config.run.seed, epoch=epoch)[at]) for epoch, at in places]
        prompts = [self._text.encode(self._env.task("train", index).prompt) for index in indices]
        answers = self._sample(torch.tensor(prompts), version)
        samples = self._config.rollout.group_size
        groups = []
        for number, ((epoch, _), index, prompt) in enumerate(zip(places, indices, prompts, strict=True)):
            own = answers[number * samples : (number + 1) * samples]
            groups.append(self._group(str(self._issued + number), epoch, index, prompt, own))
        self._issued += len(groups)
        return groups

    def _group(self, name: str, epoch: int, index: int, prompt: list[int], answers: list[Completion]) -> Group:
        task = self._env.task("train", index)
        texts = self._text.decode([answer.token_ids for answer in answers])
        episodes = [answered(task, Prompt(prompt), answer, text) for answer, text in zip(answers, texts, strict=True)]
        trajectories = []
        for number, episode in enumerate(episodes):
            scores: dict[str, Score] = {}
            for reward in self._rewards.values():
                (found,) = reward.run([episode.view])
                if isinstance(found, Failure):
                    raise SlipstreamError(str(found))
                scores[reward.name] = found
            result = weighted(scores, self._config.rewards)
            trajectories += episode.trajectories(reward=result.reward, scores=result.scores, episode=number)
        return Group(id=name, kind=TRAIN, epoch=epoch, indices=[index], trajectories=trajectories)

    def _sample(self, prompts_NL: Tensor, version: int) -> list[Completion]:
        """Answers to all prompts; those to one prompt are adjacent."""
        ids_NL = prompts_NL.repeat_interleave(self._config.rollout.group_size, dim=0)
        tokens = self._config.rollout.sampling.max_tokens
        logprobs = []
        for _ in range(tokens):
            logprobs_NV = self._next_logprobs(ids_NL)
            drawn_N1 = torch.multinomial(logprobs_NV.exp(), 1, generator=self._random)
            logprobs.append(logprobs_NV.gather(1, drawn_N1))
            ids_NL = torch.cat([ids_NL, drawn_N1], dim=1)
        spans = [VersionSpan(version=version, start=0, end=tokens)]
        return [
            Completion(token_ids=answer, logprobs=logprob, spans=spans, finish_reason="length")
            for answer, logprob in zip(ids_NL[:, -tokens:].tolist(), torch.cat(logprobs, dim=1).tolist(), strict=True)
        ]

    @torch.no_grad()
    def _next_logprobs(self, prefixes_NL: Tensor) -> Tensor:
        """Log-probs of each prefix's next token, at the run's temperature, shape [N, V]."""
        # Answers to one prompt have common prefixes: each is run once.
        different_NL, which_N = torch.unique(prefixes_NL, dim=0, return_inverse=True)
        count, length = different_NL.shape
        device = next(self._model.parameters()).device
        logits_1NV = self._model(
            input_ids=different_NL.reshape(1, -1).to(device),
            position_ids=torch.arange(length, device=device).repeat(count)[None],
            logits_to_keep=torch.arange(count, device=device) * length + length - 1,
            use_cache=False,  # with a cache, attention over packed sequences on a CPU is silently wrong
            segment_lengths=(length,) * count,
        ).logits
        logits_NV: Tensor = logits_1NV[0].float().cpu() / self._config.rollout.sampling.temperature
        return logits_NV.log_softmax(-1)[which_N]


class Training:
    """Runs, one after the other, for another process."""

    def train(self, config_json: str) -> Curves:
        """See `train`."""
        return train(RunConfig.model_validate_json(config_json))


if __name__ == "__main__":
    configure_logging("staleness", level="warning", folder=None)
    disable_progress_bar()
    asyncio.run(serve(sys.argv[1], Training()))
