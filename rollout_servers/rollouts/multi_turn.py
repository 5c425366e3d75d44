"""Episodes of several turns: actions of the policy, observations of a session, and the budgets that end them.

Sessions are user code: they run in an event loop of their own, with deadlines, and an error costs one episode.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.tracing import AnySpan, span
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.env.base import Action, Message, Observation, Session, SessionEnv, Task, Turn, is_resumable
from slipstream.env.images import has_images, separate_images
from slipstream.models.images import ImageError
from slipstream.rewards.base import Ended, Episode, EpisodeTurn
from slipstream.rewards.compose import checked_number
from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.rollouts.base import (
    AnswerGenerator,
    EpisodeFailed,
    Played,
    PlayedEpisode,
    play_together,
)
from slipstream.rollout_servers.rollouts.conversation import ChatFormat, Conversation, shorten
from slipstream.rollout_servers.rollouts.env_loop import EnvLoop
from slipstream.rollout_servers.rollouts.record import EncodedCompletion, EpisodeRecord, TicketRecord
from slipstream.rollout_servers.tally import NOT_RESUMED, Tally

log = get_log("rollout.sessions")

CLOSE_S = 10.0
"""Deadline of a session's `close`."""

CUTS = "observations_cut"
"""Metric of an episode: its observations that exceeded `rollout.episode.observation_tokens`."""


class Sessions:
    """Runs all sessions in a thread beside the server's: one that blocks must not delay heartbeats."""

    def __init__(self, env: SessionEnv, *, group_deadline_s: float) -> None:
        """`group_deadline_s` is named in errors."""
        self._env = env
        self._group_deadline_s = group_deadline_s
        self._loop = EnvLoop("sessions", reason="env_error")

    @asynccontextmanager
    async def open(self, task: Task, *, until: float) -> AsyncIterator["OpenSession"]:
        """A new session, closed at the end; `until`, the loop's time, is the deadline of its methods.

        Raises: EpisodeFailed (`env_error`).
        """
        opened: list[Session] = []  # filled in the sessions' thread: a cancelled start must be closed too

        async def reset() -> Any:
            opened.append(self._env.session(task))
            return await opened[0].reset()

        async def close() -> None:
            for session in opened:
                await session.close()

        try:
            opening = _checked_opening(await self._call(until, reset))
            yield OpenSession(
                opening, lambda action: self._call(until, opened[0].step, action), is_resumable(opened[0])
            )
        finally:
            closing = asyncio.wrap_future(self._loop.submit(close))
            # Unlike a plain await this does not cancel the close when the episode is cancelled.
            done, _ = await asyncio.wait([closing], timeout=CLOSE_S)
            error = closing.exception() if done else f"not closed within {CLOSE_S:g} s"
            if error is not None:
                log.warning("session not closed", error=str(error))

    def close(self) -> None:
        """Ends the thread."""
        self._loop.close()

    async def _call(self, until: float, function: Callable[..., Awaitable[Any]], *arguments: object) -> Any:
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.wrap_future(self._loop.submit(function, *arguments))
        except TimeoutError:
            detail = f"no observation within rollout.group_deadline_s={self._group_deadline_s:g}"
            raise EpisodeFailed("env_error", detail) from None


@dataclass(frozen=True)
class OpenSession:
    """A session after its `reset`, which returned `opening`."""

    opening: Observation
    call_step: Callable[[Action], Awaitable[Any]]
    is_resumable: bool

    async def step(self, action: Action) -> Turn:
        """The turn after an action. Raises: EpisodeFailed (`env_error`) also for a result that can't be trained on."""
        turn: object = await self.call_step(action)
        if not isinstance(turn, Turn) or not _is_dialogue(turn.observation) or not isinstance(turn.metrics, Mapping):
            detail = f"step returned {repr(turn)[:200]}, which is no Turn with a text or chat messages as observation"
            raise EpisodeFailed("env_error", detail)
        numbers: list[object] = [turn.reward, *turn.metrics.values()]
        for number in numbers:
            try:
                checked_number(number)
            except (TypeError, ValueError, OverflowError) as error:
                raise EpisodeFailed("env_error", f"reward or metric of step: {error}") from None
        return turn


def _checked_opening(result: object) -> Observation:
    """Raises: EpisodeFailed (`env_error`)."""
    opening = result if isinstance(result, Observation) else Observation(result)  # type: ignore[arg-type]
    tools: object = opening.tools
    if not _is_dialogue(opening.messages) or not isinstance(tools, Sequence):
        raise EpisodeFailed("env_error", f"reset returned {repr(result)[:200]}, which is no text and no chat messages")
    return opening


def _is_dialogue(observation: object) -> bool:
    """True for a text, and for messages with a role."""
    return isinstance(observation, str) or (
        isinstance(observation, Sequence)
        and all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in observation)
    )


@dataclass
class _State:
    """An episode while it is played."""

    conversation: Conversation
    turns: list[EpisodeTurn] = field(default_factory=list)
    env_rewards: list[tuple[int, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def add_action(self, action: Action, content: str) -> None:
        """Records an action, which is the last part of the context."""
        self.turns.append(
            EpisodeTurn(
                text=action.text,
                tokens=len(action.token_ids),
                end=self.conversation.end,
                tool_calls=[asdict(call) for call in action.tool_calls],
                content=content,
            )
        )

    def add_turn(self, turn: Turn) -> None:
        """Records what the env gave for the last action, but its observation."""
        self.env_rewards.append((self.conversation.end, float(turn.reward)))
        for name, value in turn.metrics.items():
            self.count(name, float(value))

    def add_observation(self, observation: str | Sequence[Message]) -> None:
        """Records an observation that is part of the context."""
        plain = observation if isinstance(observation, str) else [dict(message) for message in observation]
        self.turns[-1] = replace(self.turns[-1], observation=plain)

    def count(self, name: str, value: float) -> None:
        """Adds to a metric."""
        self.metrics[name] = self.metrics.get(name, 0.0) + value


@dataclass(frozen=True)
class _Budgets:
    """The limits of one episode.

    Attributes:
        until: deadline of its group, the loop's time.
        wall_at: end of its time; None without such a limit.
    """

    config: RolloutConfig
    until: float
    wall_at: float | None

    @classmethod
    def start(cls, config: RolloutConfig, *, until: float) -> "_Budgets":
        """The limits of an episode that begins now."""
        wall_s = config.episode.wall_s
        return cls(config, until, None if wall_s is None else asyncio.get_running_loop().time() + wall_s)

    @property
    def generation_until(self) -> float:
        """Deadline of an answer."""
        return self.until if self.wall_at is None else min(self.until, self.wall_at)

    @property
    def wall_is_first(self) -> bool:
        """True if an answer that is cut off now has exceeded the episode's time, and not its group's."""
        return self.wall_at is not None and self.wall_at < self.until

    def room(self, conversation: Conversation) -> int:
        """Tokens that the episode may still have, at least 0."""
        context = self.config.engine.max_model_len - len(conversation.context)
        return max(0, min(self.config.episode_tokens - conversation.used_tokens, context))

    def limit_of(self, completion: Completion) -> Ended:
        """The limit that cut off an answer."""
        return "length" if len(completion.token_ids) >= self.config.sampling.max_tokens else "tokens"


class Diverged(SlipstreamError):
    """A session gave other observations for the finished turns of an episode than before."""


class _FinishedTurn(msgspec.Struct, frozen=True, array_like=True):
    """An answer, with a digest of its context."""

    context: bytes
    answer: EncodedCompletion


class _Recorded:
    """Finished turns of an episode.

    Attributes:
        left: those of an earlier server that are not repeated yet.
    """

    def __init__(self, record: EpisodeRecord) -> None:
        self._record = record
        self.left = [msgspec.msgpack.decode(event.content, type=_FinishedTurn) for event in record.kept]

    def next(self, context: Sequence[int]) -> Completion | None:
        """The answer of an earlier server to this context, if it has one. Raises: Diverged."""
        if not self.left:
            return None
        turn = self.left.pop(0)
        if turn.context != _digest(context):
            raise Diverged("the session has other observations than before")
        return turn.answer.completion()

    def add(self, context: Sequence[int], completion: Completion) -> None:
        """Has an answer kept. Nobody waits for that: until then, a lost server costs the turn."""
        content = msgspec.msgpack.encode(_FinishedTurn(_digest(context), EncodedCompletion.of(completion)))
        self._record.add(content, tokens=len(completion.token_ids))


def _digest(context: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(context, dtype=np.int64).tobytes(), digest_size=16).digest()


class MultiTurn:
    """Plays each episode of a group in a session of its own."""

    def __init__(self, env: SessionEnv, policy: AnswerGenerator) -> None:
        self._policy = policy
        self._config = policy.config
        self._format = ChatFormat.of(policy.tokenizer, policy.config.episode)
        self._sessions = Sessions(env, group_deadline_s=policy.config.group_deadline_s)

    async def play(
        self, task: Task, *, samples: int, greedy: bool, until: float, tally: Tally, record: TicketRecord
    ) -> Played:
        """Plays `samples` episodes of the task (`Rollout.play`). Raises: EngineError."""

        async def play_one(number: int, tokens: Tally, traced: AnySpan) -> PlayedEpisode | None:
            steps = record.episode(number)
            tokens.take(steps.kept_tokens)
            try:
                episode = await self._play(task, steps, greedy=greedy, until=until, tally=tokens)
            except Diverged as error:
                log.warning("episode begins again", ticket=record.id, lost_tokens=tokens.sampled, reason=str(error))
                tokens.lose(NOT_RESUMED)
                episode = await self._play(task, None, greedy=greedy, until=until, tally=tokens)
            if episode is not None:
                traced.note(ended=episode.view.ended, turns=len(episode.view.turns))
            return episode

        return await play_together(samples, tally, play_one)

    async def _play(
        self, task: Task, steps: EpisodeRecord | None, *, greedy: bool, until: float, tally: Tally
    ) -> PlayedEpisode | None:
        """One episode, which goes on from its finished turns; None when the group's deadline cut it off.

        Raises: Diverged, EpisodeFailed, EngineError.
        """
        conversation = Conversation(self._format, self._config.episode.history, self._policy.expand)
        state, budgets = _State(conversation), _Budgets.start(self._config, until=until)
        async with self._sessions.open(task, until=until) as session:
            if steps is not None and not session.is_resumable:
                if steps.kept:
                    raise Diverged("its session is not resumable")
                steps = None
            recorded = None if steps is None else _Recorded(steps)
            self._begin(conversation, session.opening, task)
            ended = await self._turns(session, state, budgets, recorded, greedy=greedy, tally=tally)
            if recorded is not None and recorded.left:
                raise Diverged("the session has ended earlier than before")
            return self._played(task, state, ended) if ended else None

    def close(self) -> None:
        """Ends the sessions' thread."""
        self._sessions.close()

    def _begin(self, conversation: Conversation, opening: Observation, task: Task) -> None:
        images: Sequence[bytes] = ()
        if task.images or has_images(opening.messages):
            try:
                messages, images = separate_images(opening.messages, task.images)
            except ImageError as error:
                raise EpisodeFailed(error.reason, error.detail) from error
            opening = replace(opening, messages=messages)
        shown = self._format.for_template(opening)
        conversation.begin(opening, self._policy.prompt(shown.messages, images, tools=shown.tools))

    async def _turns(
        self,
        session: OpenSession,
        state: _State,
        budgets: _Budgets,
        recorded: _Recorded | None,
        *,
        greedy: bool,
        tally: Tally,
    ) -> Ended | None:
        """Plays the turns; None when the group's deadline cut the last one off.

        Raises: Diverged, EpisodeFailed, EngineError.
        """
        conversation = state.conversation
        while True:
            completion = recorded.next(conversation.context) if recorded else None
            if completion is None:
                completion = await self._generate(conversation, budgets, recorded, greedy=greedy, tally=tally)
            if completion.token_ids:
                action, content = conversation.add_answer(completion)
                state.add_action(action, content)
            if completion.finish_reason == "abort" or not completion.token_ids:
                return "wall" if budgets.wall_is_first and state.turns else None
            try:
                with span("env step", turn=len(state.turns), tool_calls=len(action.tool_calls)):
                    async with asyncio.timeout_at(budgets.wall_at):
                        turn = await session.step(action)
            except TimeoutError:
                return "wall"
            state.add_turn(turn)
            ended = self._observe(turn, completion, state, budgets)
            if ended is not None:
                return ended

    async def _generate(
        self, conversation: Conversation, budgets: _Budgets, recorded: _Recorded | None, *, greedy: bool, tally: Tally
    ) -> Completion:
        """An answer to the dialogue. Raises: EpisodeFailed, EngineError."""
        (completion,) = await self._policy.generate(
            conversation.context,
            images=conversation.transcripts[-1].images,
            samples=1,
            greedy=greedy,
            until=budgets.generation_until,
            tally=tally,
            max_tokens=min(budgets.room(conversation), self._config.sampling.max_tokens),
        )
        if recorded is not None and completion.token_ids and completion.finish_reason != "abort":
            recorded.add(conversation.context, completion)
        return completion

    def _observe(self, turn: Turn, completion: Completion, state: _State, budgets: _Budgets) -> Ended | None:
        """Appends a turn's observation, unless the episode ends: the reason. Raises: EpisodeFailed."""
        conversation, limits, observation = state.conversation, self._config.episode, turn.observation
        if completion.finish_reason == "length" and (turn.done or isinstance(observation, str)):
            return budgets.limit_of(completion)
        if turn.done:
            return "done"
        if limits.turns is not None and len(state.turns) >= limits.turns:
            return "turns"
        if limits.observation_tokens is not None:
            observation, is_cut = shorten(observation, self._policy.tokenizer, limits.observation_tokens)
            state.count(CUTS, float(is_cut))
        continuation = conversation.continuation(observation)
        if not conversation.fits(continuation, room=budgets.room(conversation)):
            return "tokens"
        conversation.add(observation, continuation)
        state.add_observation(observation)
        return None

    def _played(self, task: Task, state: _State, ended: Ended) -> PlayedEpisode:
        state.conversation.finish()
        view = Episode(
            prompt=state.conversation.opening.messages,
            reference=task.reference,
            info=task.info,
            turns=tuple(state.turns),
            prompt_tokens=state.conversation.transcripts[0].prompt_tokens,
            finish_reason="length" if ended in ("length", "tokens", "wall") else "stop",
            ended=ended,
        )
        return PlayedEpisode(state.conversation.transcripts, view, state.env_rewards, state.metrics)
