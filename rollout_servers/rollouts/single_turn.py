"""A single-turn episode: a task's prompt, the policy's answers, their rewards."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.buffer.wire import messages as m
from slipstream.configs.runtime.errors import SlipstreamError, format_error
from slipstream.configs.runtime.threads import SerialThread
from slipstream.configs.schema import RunConfig
from slipstream.env.base import Env, Split, Task
from slipstream.rewards.base import RewardFailed
from slipstream.rewards.compose import weighted
from slipstream.rewards.functions.overlong import SCORE as OVERLONG
from slipstream.rewards.functions.overlong import overlong
from slipstream.rewards.runners.pool import Scorer
from slipstream.rollout_servers.engines.base import Completion, Engine, RequestRefused
from slipstream.rollout_servers.tokenizer import PromptError, Text

ENGINE_GRACE_S = 10.0
"""Time for an engine, after the group's deadline, to cut short what it has not finished."""


class EpisodeFailed(SlipstreamError):
    """An episode came to nothing; its group is dropped and counted under `reason`."""

    def __init__(self, reason: str, detail: str, tokens: int = 0) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.tokens = tokens


@dataclass(frozen=True)
class Answered:
    """A task with the policy's answers, to be scored until `until`, the event loop's time."""

    split: Split
    index: int
    task: Task
    prompt_ids: list[int]
    answers: list[Completion]
    until: float


@dataclass(frozen=True)
class Player:
    """Plays episodes of one env with one engine."""

    config: RunConfig
    env: Env
    text: Text
    engine: Engine
    scorer: Scorer
    engine_grace_s: float = ENGINE_GRACE_S
    env_thread: SerialThread = field(default_factory=SerialThread)
    """Asks the env for tasks: it may take its time, and need not be thread-safe."""

    async def play(self, split: Split, index: int, *, samples: int, greedy: bool = False) -> list[m.Trajectory]:
        """`samples` answers to one task, scored. Raises: as `answer` and `score` do."""
        return await self.score(await self.answer(split, index, samples=samples, greedy=greedy))

    async def answer(self, split: Split, index: int, *, samples: int, greedy: bool = False) -> Answered:
        """`samples` answers to one task; held-out tasks are always answered greedily.

        Fewer, but at least `rollout.min_group_size`, if the others were not finished at `rollout.group_deadline_s`.

        Raises: EpisodeFailed when the task or its prompt is at fault, EngineError when the engine is dead.
        """
        until = asyncio.get_running_loop().time() + self.config.buffer.ticket_deadline_s
        task = await self._task(split, index)
        prompt_ids = self._prompt_ids(task, split, index)
        answers = await self._answers(prompt_ids, split, index, samples=samples, greedy=greedy or split == "eval")
        return Answered(split, index, task, prompt_ids, answers, until)

    async def score(self, answered: Answered) -> list[m.Trajectory]:
        """The answers with their rewards. Raises: EpisodeFailed when a reward is at fault."""
        task, answers, evaluation = answered.task, answered.answers, answered.split == "eval"
        texts = self.text.decode([answer.token_ids for answer in answers])
        terms = self.config.evaluated if evaluation else self.config.rewards
        names = [term.name for term in terms]
        try:
            scores = await self.scorer.score(
                texts, task.reference, task.info, names=names, until=answered.until, evaluation=evaluation
            )
        except RewardFailed as error:
            tokens = sum(len(answer.token_ids) for answer in answers)
            detail = f"task {self._name(answered.split, answered.index)}: {error}"
            raise EpisodeFailed(error.reason, detail, tokens) from error
        shapings = [{} if evaluation else self._shaping(answer) for answer in answers]
        return [
            trajectory(
                answered.prompt_ids,
                answer,
                score | shaping,
                weighted(score, terms) + sum(shaping.values()),
                episode=number,
            )
            for number, (answer, score, shaping) in enumerate(zip(answers, scores, shapings, strict=True))
        ]

    async def _answers(
        self, prompt_ids: list[int], split: Split, index: int, *, samples: int, greedy: bool
    ) -> list[Completion]:
        deadline_s = self.config.rollout.group_deadline_s
        try:
            async with asyncio.timeout(deadline_s + self.engine_grace_s):
                answers = await self.engine.generate(prompt_ids, samples=samples, greedy=greedy, deadline_s=deadline_s)
        except TimeoutError:
            raise self._too_late(split, index, "the engine does not answer") from None
        except RequestRefused as error:
            raise EpisodeFailed("request_refused", f"task {self._name(split, index)}: {error}") from error
        finished = [answer for answer in answers if answer.finish_reason != "abort"]
        enough = self.config.rollout.min_group_size if split == "train" else None
        if len(finished) < min(samples, enough or samples):
            tokens = sum(len(answer.token_ids) for answer in answers)
            raise self._too_late(split, index, f"{len(finished)} of {samples} answers finished", tokens)
        return finished

    def _shaping(self, answer: Completion) -> dict[str, float]:
        """What is added to an answer's reward for its shape, by name."""
        config = self.config.rollout.overlong
        if config is None:
            return {}
        penalty = overlong(
            len(answer.token_ids),
            truncated=answer.finish_reason == "length",
            max_tokens=self.config.rollout.sampling.max_tokens,
            cache_tokens=config.cache_tokens,
            penalty=config.penalty,
        )
        return {OVERLONG: penalty}

    def _too_late(self, split: Split, index: int, what: str, tokens: int = 0) -> EpisodeFailed:
        deadline_s = self.config.rollout.group_deadline_s
        detail = f"task {self._name(split, index)}: {what} within rollout.group_deadline_s={deadline_s:g}"
        return EpisodeFailed("generation_timeout", detail, tokens)

    async def _task(self, split: Split, index: int) -> Task:
        deadline_s = self.config.rollout.group_deadline_s
        try:
            return await self.env_thread.call(self._asked, split, index, deadline_s=deadline_s)
        except TimeoutError:
            detail = f"no task within rollout.group_deadline_s={deadline_s:g}; an env is asked for one at a time"
            raise EpisodeFailed("env_error", f"task {self._name(split, index)}: {detail}") from None

    def _asked(self, split: Split, index: int) -> Task:
        """What the env gives, in its thread. Raises: EpisodeFailed."""
        try:
            task: object = self.env.task(split, index)
            if not isinstance(task, Task) or not isinstance(task.info, Mapping):
                raise TypeError(f"{repr(task)[:200]} is no Task whose info is a mapping")
            return task
        # Whatever a user's plug-in raises, or its sys.exit(), costs this task and nothing else. Nobody else interrupts
        # this thread: a KeyboardInterrupt or a CancelledError here is the plug-in's too.
        except BaseException as error:
            raise EpisodeFailed("env_error", f"task {self._name(split, index)}: {format_error(error)}") from error

    def _prompt_ids(self, task: Task, split: Split, index: int) -> list[int]:
        try:
            prompt_ids = self.text.encode(task.prompt)
        except PromptError as error:
            raise EpisodeFailed("prompt_untokenizable", f"task {self._name(split, index)}: {error}") from error
        limit = self.config.rollout.engine.max_model_len - self.config.rollout.sampling.max_tokens
        if not prompt_ids or len(prompt_ids) > limit:
            raise EpisodeFailed(
                "prompt_too_long" if prompt_ids else "prompt_empty",
                f"task {self._name(split, index)} has {len(prompt_ids)} prompt tokens; "
                f"rollout.engine.max_model_len - rollout.sampling.max_tokens leaves {limit}",
            )
        return prompt_ids

    def _name(self, split: Split, index: int) -> str:
        return f"({self.config.env.name}, {split}, {index})"


def trajectory(
    prompt_ids: Sequence[int], answer: Completion, scores: dict[str, float], reward: float, *, episode: int = 0
) -> m.Trajectory:
    """The trajectory of one prompt and one answer; prompt tokens carry no action and log-prob 0."""
    prompt, total = len(prompt_ids), len(prompt_ids) + len(answer.token_ids)
    mask = np.zeros(total, dtype=m.MASK_DTYPE)
    mask[prompt:] = 1
    logprobs = np.zeros(total, dtype=m.LOGPROB_DTYPE)
    logprobs[prompt:] = answer.logprobs
    return m.Trajectory(
        token_ids=np.array([*prompt_ids, *answer.token_ids], dtype=m.TOKEN_DTYPE).tobytes(),
        action_mask=mask.tobytes(),
        behaviour_logprobs=logprobs.tobytes(),
        spans=[
            m.VersionSpan(version=span.version, start=prompt + span.start, end=prompt + span.end)
            for span in answer.spans
        ],
        reward=reward,
        scores=scores,
        finish_reason=answer.finish_reason,
        episode=episode,
    )
