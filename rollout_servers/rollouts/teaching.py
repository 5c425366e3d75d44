"""The teachers' part in a group: their prompts with a context, and log-probs of inference servers."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import action_mask, token_ids
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.distill import DistillConfig, TeacherConfig
from slipstream.env.base import Env, offers_tools, runs_agents
from slipstream.models.tokenizer import PromptError, Tokenizer
from slipstream.rewards.base import Episode, RewardUnavailable, text_of
from slipstream.rewards.compose import EpisodeReward
from slipstream.rewards.scorer import DELIVERY_S
from slipstream.rewards.teacher import TeacherServer, TokenScores
from slipstream.rollout_servers.rollouts.base import EpisodeFailed, first_error

if TYPE_CHECKING:
    from slipstream.configs import RunConfig

_COMPARED_TOKENS: Final = 4096
"""Tokens whose text is compared in one request."""


@dataclass(frozen=True)
class Answered:
    """An episode of a group, with its reward."""

    episode: Episode
    result: EpisodeReward


@dataclass(frozen=True)
class Teaching:
    """The teachers of a run, as far as rollout servers have to do with them."""

    config: DistillConfig
    tokenizer: Tokenizer
    servers: Mapping[str, TeacherServer]
    """Inference servers by their url."""

    @classmethod
    async def open(cls, config: "RunConfig", env: Env, tokenizer: Tokenizer) -> Self | None:
        """The teachers of a run; None without distillation.

        Raises: ConfigError when an inference server does not answer, has other tokens than the policy or may be too
        slow, or a context would leave out the tools of the env's prompts.
        """
        distill = config.learner.distill
        if distill is None:
            return None
        if (offers_tools(env) or runs_agents(env)) and any(teacher.context is not None for teacher in distill.teachers):
            raise ConfigError(
                f"learner.distill.teachers: the prompts of env {config.env.name!r} offer tools, or may, as those of "
                "agents, which a context would leave out; remove context"
            )
        servers = {
            teacher.url: TeacherServer(teacher, top_k=distill.top_k, vocabulary=tokenizer.vocab_size)
            for teacher in distill.engines
            if teacher.url is not None
        }
        teaching = cls(distill, tokenizer, servers)
        left_s = config.buffer.ticket_deadline_s - config.rollout.group_deadline_s - DELIVERY_S
        for number, teacher in enumerate(distill.teachers):
            if teacher.url is None:
                continue
            server = servers[teacher.url]
            if server.worst_case_s > left_s:
                raise ConfigError(
                    f"learner.distill.teachers.{number}.timeout_s={teacher.timeout_s:g} is {server.worst_case_s:g} s "
                    f"with all tries; buffer.ticket_deadline_s and rollout.group_deadline_s leave {left_s:g} s"
                )
            await teaching._require_same_tokens(f"learner.distill.teachers.{number}.url={teacher.url}", server)
        return teaching

    async def add(
        self, trajectories: Sequence[m.Trajectory], answers: Sequence[Answered], *, env: str | None, until: float
    ) -> list[m.Trajectory]:
        """The trajectories of a group with what the teacher of their env gives.

        Args:
            answers: the group's episodes, by the number that the trajectories have.
            env: label of the env in a mixture.
            until: the event loop's time at which the ticket is void.

        Raises: EpisodeFailed when the teacher gives nothing, for one of them.
        """
        teacher = self.config.of_env(env)
        if teacher is None:
            return list(trajectories)
        prompted = self._with_prompts(teacher, trajectories, answers) if teacher.context else list(trajectories)
        if teacher.url is None:
            return prompted
        server = self.servers[teacher.url]
        left_s = until - asyncio.get_running_loop().time() - DELIVERY_S
        try:
            async with asyncio.timeout(max(0.0, left_s)), asyncio.TaskGroup() as tasks:
                scored = [tasks.create_task(_scored(server, teacher, each)) for each in prompted]
        except TimeoutError:
            raise EpisodeFailed(
                "teacher_unavailable", f"{teacher.url}: no log-probs before the ticket's time was over"
            ) from None
        except BaseExceptionGroup as errors:
            error = first_error(RewardUnavailable, errors)
            if error is None:
                raise
            raise EpisodeFailed("teacher_unavailable", str(error)) from error
        return [task.result() for task in scored]

    def _with_prompts(
        self, teacher: TeacherConfig, trajectories: Sequence[m.Trajectory], answers: Sequence[Answered]
    ) -> list[m.Trajectory]:
        """With the teacher's prompt, of the first trajectory of each episode; the others have another beginning."""
        prompts = [self._prompt(teacher, number, answers) for number in range(len(answers))]
        prompted, begun = list[m.Trajectory](), set[int]()
        for trajectory in trajectories:
            prompt = prompts[trajectory.episode] if trajectory.episode not in begun else b""
            begun.add(trajectory.episode)
            prompted.append(msgspec.structs.replace(trajectory, teacher_prompt=prompt))
        return prompted

    def _prompt(self, teacher: TeacherConfig, number: int, answers: Sequence[Answered]) -> bytes:
        """Tokens of the teacher's prompt for an answer; none where its context lacks something."""
        assert teacher.context is not None, "the policy's prompt is in the trajectory"
        answered = answers[number]
        given = {
            "reference": answered.episode.reference,
            "feedback": answered.result.feedback,
            "solution": _solution(answers, number, teacher.solution_reward),
        }
        if not all(given[name] for name in teacher.context_fields if name != "prompt"):
            return b""
        prompt = answered.episode.prompt
        if isinstance(prompt, str):
            changed: str | Sequence[Mapping[str, Any]] = teacher.context.format(prompt=prompt, **given)
        else:
            users = [index for index, message in enumerate(prompt) if message.get("role") == "user"]
            if not users:
                return b""
            last = prompt[users[-1]]
            content = teacher.context.format(prompt=text_of(last.get("content")), **given)
            changed = [*prompt[: users[-1]], {**last, "content": content}, *prompt[users[-1] + 1 :]]
        try:
            return np.array(self.tokenizer.encode(changed), dtype=m.TOKEN_DTYPE).tobytes()
        except PromptError as error:
            raise EpisodeFailed("prompt_untokenizable", f"with the teacher's context: {error}") from error

    async def _require_same_tokens(self, key: str, server: TeacherServer) -> None:
        """Raises: ConfigError when the server's tokens have other texts than the policy's, or it does not answer."""
        for first in range(0, self.tokenizer.tokens, _COMPARED_TOKENS):
            ids = range(first, min(first + _COMPARED_TOKENS, self.tokenizer.tokens))
            try:
                text = await server.detokenized(ids)
            except RewardUnavailable as error:
                raise ConfigError(f"{key} does not answer: {error}") from error
            if text != self.tokenizer.decode_as_served(ids):
                raise ConfigError(
                    f"{key}: its tokens {first} to {ids[-1]} have another text than the policy's; choose a teacher "
                    "with the policy's tokenizer"
                )


def _solution(answers: Sequence[Answered], number: int, least: float) -> str:
    """Text of the best other answer whose reward is at least `least`; empty without one."""
    others = [each for index, each in enumerate(answers) if index != number and each.result.reward >= least]
    return max(others, key=lambda each: each.result.reward).episode.answer if others else ""


async def _scored(server: TeacherServer, teacher: TeacherConfig, trajectory: m.Trajectory) -> m.Trajectory:
    """With the log-probs of the policy's tokens. Raises: RewardUnavailable."""
    ids, mask = token_ids(trajectory), action_mask(trajectory)
    if teacher.context is not None:
        if not trajectory.teacher_prompt:
            return trajectory
        prompt, start = np.frombuffer(trajectory.teacher_prompt, dtype=m.TOKEN_DTYPE), int(mask.argmax())
        ids = np.concatenate([prompt, ids[start:]])
        mask = np.concatenate([np.zeros(len(prompt), dtype=mask.dtype), mask[start:]])
    found: TokenScores = await server.score(ids.tolist(), np.flatnonzero(mask).tolist())
    return msgspec.structs.replace(
        trajectory,
        teacher_logprobs=np.array(found.logprobs, dtype=m.LOGPROB_DTYPE).tobytes(),
        teacher_top_ids=np.array(found.top_ids, dtype=m.TOKEN_DTYPE).tobytes(),
        teacher_top_logprobs=np.array(found.top_logprobs, dtype=m.LOGPROB_DTYPE).tobytes(),
    )
