"""The contract of rollouts: the episodes of one task, played but not scored, as token sequences."""

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import numpy as np

from slipstream.buffer.wire import messages as m
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.tracing import AnySpan, span
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.env.base import Task
from slipstream.models.images import ImageError
from slipstream.models.tokenizer import PromptError, Tokenizer
from slipstream.rewards import base as rewards
from slipstream.rewards.base import Episode, EpisodeTurn
from slipstream.rollout_servers.engines.base import Completion, Engine, PromptImage, Request, RequestRefused
from slipstream.rollout_servers.placeholders import ImagePlaceholders
from slipstream.rollout_servers.rollouts.record import TicketRecord
from slipstream.rollout_servers.tally import UNFINISHED, Tally

ENGINE_GRACE_S = 10.0
"""Time for an engine to cut unfinished answers short after their deadline."""

SILENT: Final = "session_silent"
"""Reason of a group whose sessions got no word from outside until their deadline: its task is issued again."""

FailureReason = (
    Literal[
        "env_error",
        "prompt_untokenizable",
        "prompt_empty",
        "prompt_too_long",
        "image_unreadable",
        "image_too_large",
        "request_refused",
        "generation_timeout",
        "superseded",
        "teacher_unavailable",
        "agent_error",
        "agent_timeout",
        "reward_missing",
        "session_void",
        "session_silent",
    ]
    | rewards.FailureReason
)


class EpisodeFailed(SlipstreamError):
    """An episode can't be finished or scored; its group is dropped and counted under `reason`.

    Attributes:
        lengths: of its finished episodes, in action tokens.
    """

    def __init__(self, reason: FailureReason, detail: str, lengths: Sequence[int] = ()) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: FailureReason = reason
        self.detail = detail
        self.lengths = lengths


def first_error(kind: type[Exception], errors: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """The first error of a kind among those of a TaskGroup, or None."""
    error: BaseException | None = errors.subgroup(kind)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass
class Transcript:
    """The token sequence of an episode: a prompt, then actions and observations. Nothing is ever tokenised again.

    Attributes:
        token_ids: all tokens so far.
        prompt_tokens: how many of them are the prompt.
        images: of the prompt.
        actions: the engine's answers, each with the index of its first token.
        agents: labels of the answers, if agents have any.
    """

    token_ids: list[int]
    prompt_tokens: int
    images: Sequence[PromptImage] = ()
    actions: list[tuple[int, Completion]] = field(default_factory=list)
    agents: Sequence[m.AgentSpan] = ()

    @classmethod
    def begin(cls, prompt: "Prompt") -> "Transcript":
        """The transcript before the first action."""
        return cls(list(prompt.token_ids), len(prompt.token_ids), prompt.images)

    def add_action(self, completion: Completion) -> None:
        """Appends what the engine generated."""
        self.actions.append((len(self.token_ids), completion))
        self.token_ids.extend(completion.token_ids)

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not choose."""
        self.token_ids.extend(token_ids)

    def end_with_action(self) -> None:
        """Drops what follows the last action."""
        start, completion = self.actions[-1]
        del self.token_ids[start + len(completion.token_ids) :]

    @property
    def action_tokens(self) -> int:
        """Number of tokens that the policy chose."""
        return sum(len(completion.token_ids) for _, completion in self.actions)

    @property
    def versions(self) -> set[int]:
        """Policy versions of the tokens that the policy chose."""
        return {span.version for _, completion in self.actions for span in completion.spans}

    def trajectory(
        self,
        *,
        reward: float,
        scores: dict[str, float],
        finish_reason: str,
        episode: int,
        turn_rewards: Sequence[m.RewardSpan] = (),
    ) -> m.Trajectory:
        """The trajectory to send; tokens that are no action have the mask 0 and the log-prob 0.

        Args:
            reward: of the whole episode.
            episode: index within the group.
            turn_rewards: (end, value) of what single turns earned.
        """
        mask = np.zeros(len(self.token_ids), dtype=m.MASK_DTYPE)
        logprobs = np.zeros(len(self.token_ids), dtype=m.LOGPROB_DTYPE)
        spans: list[m.VersionSpan] = []
        for start, completion in self.actions:
            end = start + len(completion.token_ids)
            mask[start:end] = 1
            logprobs[start:end] = completion.logprobs
            spans += [
                m.VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
                for span in completion.spans
            ]
        return m.Trajectory(
            routed_experts=self._routed_experts(),
            kept_tokens=self._kept_tokens(),
            token_ids=np.array(self.token_ids, dtype=m.TOKEN_DTYPE).tobytes(),
            action_mask=mask.tobytes(),
            behaviour_logprobs=logprobs.tobytes(),
            spans=spans,
            reward=reward,
            scores=scores,
            finish_reason=finish_reason,
            episode=episode,
            rewards=list(turn_rewards),
            agents=list(self.agents),
            images=[image_id(image.encoded) for image in self.images],
        )

    def _kept_tokens(self) -> m.KeptTokens | None:
        """The tokens that top-k and top-p left to choose from; None where they left all."""
        counts, ids = np.zeros(len(self.token_ids), dtype=m.TOKEN_DTYPE), list[bytes]()
        for start, completion in self.actions:
            for index, kept in enumerate(completion.kept or ()):
                counts[start + index] = len(kept)
                ids.append(kept.astype(m.TOKEN_DTYPE).tobytes())
        return m.KeptTokens(counts=counts.tobytes(), ids=b"".join(ids)) if ids else None

    def _routed_experts(self) -> m.RoutedExperts | None:
        """Experts of the input tokens, each as of the first request that had it: its answer was sampled with them.

        None without those of the last answer.
        """
        ids, covered, layout = b"", 0, None
        for start, completion in self.actions:
            if not completion.token_ids:
                continue
            routed, end = completion.routed_experts, start + len(completion.token_ids) - 1
            if routed is None:
                ids = b""
                continue
            if not ids or routed.tokens < end - covered:  # a gap: only what follows it can be sent
                ids, covered = b"", end - routed.tokens
            layout = routed.layout
            ids += routed.ids[len(routed.ids) - (end - covered) * layout.token_bytes :]
            covered = end
        is_complete = covered == len(self.token_ids) - 1
        return m.RoutedExperts(layout=layout, ids=ids) if layout is not None and ids and is_complete else None


def image_id(encoded: bytes) -> str:
    """Hash of an image, by which the trajectories of a group name it."""
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt, all placeholders of its images included, and these images."""

    token_ids: Sequence[int]
    images: Sequence[PromptImage] = ()


@dataclass(frozen=True)
class PlayedEpisode:
    """A finished episode.

    Attributes:
        transcripts: in the order in which they were generated; their last tokens are actions.
        view: what rewards are given of it.
        env_rewards: what the env gave for actions, as (end, value) with `end` as in `EpisodeTurn`; None in an env
            without sessions.
        metrics: the env's metrics, summed over the turns.
    """

    transcripts: Sequence[Transcript]
    view: rewards.Episode
    env_rewards: Sequence[tuple[int, float]] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def action_tokens(self) -> int:
        """Number of tokens that the policy chose."""
        return sum(transcript.action_tokens for transcript in self.transcripts)

    @property
    def versions(self) -> set[int]:
        """Policy versions of these tokens."""
        return set[int]().union(*(transcript.versions for transcript in self.transcripts))

    def trajectories(
        self,
        *,
        reward: float,
        scores: dict[str, float],
        episode: int,
        turn_rewards: Sequence[tuple[int, float]] = (),
    ) -> list[m.Trajectory]:
        """The trajectories to send.

        Args:
            reward: of the whole episode.
            episode: index within the group.
            turn_rewards: (end, value) of what single turns earned; the rest of `reward` is credited to the last action.
        """
        trajectories, start = list[m.Trajectory](), 0
        totals = _reward_totals(turn_rewards, reward, end=sum(len(each.token_ids) for each in self.transcripts))
        for transcript in self.transcripts:
            end = start + len(transcript.token_ids)
            spans = [
                m.RewardSpan(end=place - start, value=totals[place]) for place in sorted(totals) if start < place <= end
            ]
            trajectories.append(
                transcript.trajectory(
                    reward=reward,
                    scores=scores,
                    finish_reason=self.view.ended,
                    episode=episode,
                    turn_rewards=spans,
                )
            )
            start = end
        return trajectories


def _reward_totals(turn_rewards: Sequence[tuple[int, float]], reward: float, *, end: int) -> dict[int, float]:
    """Rewards by the end of their turns, which sum to `reward`; none where no turn earned anything by itself."""
    if not turn_rewards:
        return {}
    totals: dict[int, float] = {}
    for place, value in [*turn_rewards, (end, reward - math.fsum(value for _, value in turn_rewards))]:
        totals[place] = totals.get(place, 0.0) + value
    return totals


@dataclass(frozen=True)
class Played:
    """The episodes of one task.

    Attributes:
        episodes: the finished ones.
        failure: why the first of the others failed; None where time ran out.
    """

    episodes: Sequence[PlayedEpisode]
    failure: EpisodeFailed | None = None


async def play_together(
    samples: int, tally: Tally, play: Callable[[int, Tally, AnySpan], Awaitable[PlayedEpisode | None]]
) -> Played:
    """Plays episodes of a task at the same time. Raises: EngineError.

    Args:
        play: plays one of them, by its number, counts its tokens in the tally and notes its attributes on the span;
            returns None where time ran out. Raises: EpisodeFailed, EngineError.
    """
    finished, failures = list[PlayedEpisode](), list[EpisodeFailed]()

    async def play_one(number: int) -> None:
        episode, unused = None, UNFINISHED
        with tally.part() as tokens:
            try:
                with span("episode") as traced:
                    episode = await play(number, tokens, traced)
            except EpisodeFailed as error:
                failures.append(error)
                unused = error.reason
            if episode is None:
                tokens.lose(unused)
            else:
                finished.append(episode)

    async with asyncio.TaskGroup() as tasks:
        for number in range(samples):
            tasks.create_task(play_one(number))
    return Played(finished, failures[0] if failures else None)


class Rollout(Protocol):
    """A way to play an episode."""

    async def play(
        self, task: Task, *, samples: int, greedy: bool, until: float, tally: Tally, record: TicketRecord
    ) -> Played:
        """Plays `samples` episodes of a task; those that are not finished at `until`, the loop's time, are cut short.

        Args:
            tally: counts their tokens, and discards those of episodes that are not returned.
            record: of their steps, and of those from which they go on.

        Raises: EpisodeFailed when none can be played, EngineError when the engine is dead.
        """
        ...


@dataclass(frozen=True)
class AnswerGenerator:
    """The engine with its tokenizer, for one request of an episode at a time."""

    engine: Engine
    tokenizer: Tokenizer
    config: RolloutConfig
    placeholders: ImagePlaceholders | None = None
    """Of images; None for a model of texts."""

    def prompt(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        images: Sequence[bytes] = (),
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Prompt:
        """The prompt's tokens. Raises: EpisodeFailed for one that leaves no room for `rollout.sampling.max_tokens`."""
        if images and self.placeholders is None:
            raise EpisodeFailed("prompt_untokenizable", f"the model in {self.tokenizer.model} takes no images")
        try:
            rendered = self.expand(self.tokenizer.encode(prompt, tools=tools), images)
        except PromptError as error:
            raise EpisodeFailed("prompt_untokenizable", str(error)) from error
        except ImageError as error:
            raise EpisodeFailed(error.reason, error.detail) from error
        limit, tokens = self.config.engine.max_model_len - self.config.sampling.max_tokens, len(rendered.token_ids)
        if not 0 < tokens <= limit:
            raise EpisodeFailed(
                "prompt_too_long" if tokens else "prompt_empty",
                f"{tokens} prompt tokens; rollout.engine.max_model_len - rollout.sampling.max_tokens leaves {limit}",
            )
        return rendered

    def expand(self, token_ids: Sequence[int], images: Sequence[bytes]) -> Prompt:
        """The prompt of tokens with one placeholder for each image. Raises: PromptError, ImageError."""
        return Prompt(token_ids) if self.placeholders is None else Prompt(*self.placeholders.expand(token_ids, images))

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        images: Sequence[PromptImage] = (),
        samples: int,
        greedy: bool,
        until: float,
        tally: Tally,
        max_tokens: int | None = None,
    ) -> list[Completion]:
        """Answers to a context with the images of its prompt; unfinished ones (`abort`) at `until`.

        Raises: EpisodeFailed when the engine refuses the request or misses the deadline, EngineError when it is dead.
        """
        left_s = max(0.0, until - asyncio.get_running_loop().time())
        try:
            with span("generate", context=len(token_ids), samples=samples) as traced:
                async with asyncio.timeout(left_s + ENGINE_GRACE_S):
                    answers = await self.engine.generate(
                        Request(
                            token_ids,
                            left_s,
                            samples=samples,
                            greedy=greedy,
                            max_tokens=max_tokens,
                            images=images,
                            tally=tally,
                        )
                    )
                traced.note(tokens=sum(len(answer.token_ids) for answer in answers), version=self.engine.version)
                return answers
        except TimeoutError:
            detail = f"no reply of the engine within rollout.group_deadline_s={self.config.group_deadline_s:g}"
            raise EpisodeFailed("generation_timeout", detail) from None
        except RequestRefused as error:
            raise EpisodeFailed("request_refused", str(error)) from error


@dataclass(frozen=True)
class SingleTurn:
    """All answers to a prompt are one request: engines share the prompt's KV cache."""

    policy: AnswerGenerator

    async def play(
        self, task: Task, *, samples: int, greedy: bool, until: float, tally: Tally, record: TicketRecord
    ) -> Played:
        """Plays `samples` episodes of the task (`Rollout.play`). Raises: EpisodeFailed, EngineError."""
        prompt = self.policy.prompt(task.prompt, task.images)
        answers = await self.policy.generate(
            prompt.token_ids, images=prompt.images, samples=samples, greedy=greedy, until=until, tally=tally
        )
        finished = [answer for answer in answers if answer.finish_reason != "abort" and answer.token_ids]
        texts = self.policy.tokenizer.decode([answer.token_ids for answer in finished])
        cut = sum(len(answer.token_ids) for answer in answers if answer.finish_reason == "abort")
        tally.discard(UNFINISHED, cut)
        return Played([answered(task, prompt, answer, text) for answer, text in zip(finished, texts, strict=True)])


def answered(task: Task, prompt: Prompt, answer: Completion, text: str) -> PlayedEpisode:
    """The episode of a prompt and one answer, whose text is `text`."""
    transcript = Transcript.begin(prompt)
    transcript.add_action(answer)
    turn = EpisodeTurn(text=text, tokens=len(answer.token_ids), end=len(transcript.token_ids))
    view = Episode(
        prompt=task.prompt,
        reference=task.reference,
        info=task.info,
        turns=(turn,),
        prompt_tokens=len(prompt.token_ids),
        finish_reason=answer.finish_reason,
        ended="stop" if answer.finish_reason == "stop" else "length",
    )
    return PlayedEpisode([transcript], view)
