"""Fresh groups without an engine: the learner's own model answers, env and rewards are the run's.

# N prefixes, L tokens of each, V vocabulary
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.wire.messages import TRAIN, Group, VersionSpan
from slipstream.configs import RunConfig
from slipstream.env.registry import build_env
from slipstream.rewards.compose import score_answers, weighted
from slipstream.rewards.registry import find_rewards
from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.rollouts.single_turn import trajectory
from slipstream.rollout_servers.tokenizer import Text


class Sampler:
    """Answers the run's tasks in the buffer's order; log μ is exactly what was drawn from.

    For envs whose prompts are all of one length; answers are all of `rollout.sampling.max_tokens` tokens.
    """

    def __init__(self, config: RunConfig, model: nn.Module, path: Path) -> None:
        self._config = config
        self._model = model
        self._text = Text(path)
        self._env = build_env(config.env)
        self._rewards = find_rewards([term.name for term in config.rewards])
        self._random = torch.Generator().manual_seed(config.run.seed)
        self._issued = 0

    def groups(self, version: int) -> list[Group]:
        """The next step's worth of groups, answered by the model's present weights, which are of `version`."""
        tasks = self._env.size("train")
        places = [divmod(self._issued + number, tasks) for number in range(self._config.learner.groups_per_step)]
        indices = [int(task_order(tasks, seed=self._config.run.seed, epoch=epoch)[at]) for epoch, at in places]
        prompts = [self._text.encode(self._env.task("train", index).prompt) for index in indices]
        answers = self._answers(torch.tensor(prompts), version)
        samples = self._config.rollout.group_size
        groups = []
        for number, ((epoch, _), index, prompt) in enumerate(zip(places, indices, prompts, strict=True)):
            mine = answers[number * samples : (number + 1) * samples]
            groups.append(self._group(str(self._issued + number), epoch, index, prompt, mine))
        self._issued += len(groups)
        return groups

    def _group(self, name: str, epoch: int, index: int, prompt: list[int], answers: list[Completion]) -> Group:
        task = self._env.task("train", index)
        texts = self._text.decode([answer.token_ids for answer in answers])
        scores = score_answers(self._rewards, texts, task.reference, task.info)
        trajectories = [
            trajectory(prompt, answer, score, weighted(score, self._config.rewards))
            for answer, score in zip(answers, scores, strict=True)
        ]
        return Group(id=name, kind=TRAIN, epoch=epoch, indices=[index], trajectories=trajectories)

    def _answers(self, prompts_NL: Tensor, version: int) -> list[Completion]:
        """The answers to all prompts, those to one prompt side by side."""
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
        # Answers to one prompt have their beginnings in common: each is run once.
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
