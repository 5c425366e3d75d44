"""Episodes of several turns: actions of the policy, observations of a session as plain text.

Sessions are user code: they run in an event loop of their own, with deadlines, and an error costs one episode.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from slipstream.configs.runtime.errors import format_error
from slipstream.configs.runtime.logging import get_log
from slipstream.env.base import Action, Session, SessionEnv, Task, Turn
from slipstream.rewards.base import Episode, EpisodeTurn
from slipstream.rewards.compose import checked_number
from slipstream.rollout_servers.rollouts.base import EpisodeFailed, Played, PlayedEpisode, Policy, Transcript

log = get_log("rollout.sessions")

CLOSE_S = 10.0
"""Deadline of a session's `close`."""


class Sessions:
    """Runs all sessions in a thread beside the server's: one that blocks must not delay heartbeats."""

    def __init__(self, env: SessionEnv, *, group_deadline_s: float) -> None:
        """`group_deadline_s` is named in errors."""
        self._env = env
        self._group_deadline_s = group_deadline_s
        self._loop = asyncio.new_event_loop()
        Thread(target=self._run, name="sessions", daemon=True).start()

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
            prompt = await self._call(until, reset)
            yield OpenSession(prompt, lambda action: self._call(until, opened[0].step, action))
        finally:
            closing = asyncio.wrap_future(self._submit(close))
            # Unlike a plain await this does not cancel the close when the episode is cancelled.
            done, _ = await asyncio.wait([closing], timeout=CLOSE_S)
            error = closing.exception() if done else f"not closed within {CLOSE_S:g} s"
            if error is not None:
                log.warning("session not closed", error=str(error))

    def close(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _call(self, until: float, function: Callable[..., Awaitable[Any]], *arguments: object) -> Any:
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.wrap_future(self._submit(function, *arguments))
        except TimeoutError:
            detail = f"no observation within rollout.group_deadline_s={self._group_deadline_s:g}"
            raise EpisodeFailed("env_error", detail) from None

    def _submit(self, function: Callable[..., Awaitable[Any]], *arguments: object) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(_guarded(function, arguments), self._loop)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_all(asyncio.all_tasks(self._loop)))
        self._loop.close()


@dataclass(frozen=True)
class OpenSession:
    """A session after its `reset`, which returned `prompt`."""

    prompt: str | Sequence[Mapping[str, str]]
    call_step: Callable[[Action], Awaitable[Any]]

    async def step(self, action: Action) -> Turn:
        """The turn after an action. Raises: EpisodeFailed (`env_error`) also for a result that can't be trained on."""
        turn: object = await self.call_step(action)
        if not isinstance(turn, Turn) or not isinstance(turn.observation, str) or not isinstance(turn.metrics, Mapping):
            detail = f"step returned {repr(turn)[:200]}, which is no Turn with a text as observation"
            raise EpisodeFailed("env_error", detail)
        numbers: list[object] = [turn.reward, *turn.metrics.values()]
        for number in numbers:
            try:
                checked_number(number)
            except (TypeError, ValueError, OverflowError) as error:
                raise EpisodeFailed("env_error", f"reward or metric of step: {error}") from None
        return turn


async def _guarded(function: Callable[..., Awaitable[Any]], arguments: Sequence[object]) -> Any:
    try:
        return await function(*arguments)
    # User code may raise anything; a SystemExit or a KeyboardInterrupt would end the thread's loop.
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise EpisodeFailed("env_error", format_error(error)) from error


async def _cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class _State:
    """An episode while it is played."""

    transcript: Transcript = field(default_factory=lambda: Transcript.begin([]))
    turns: list[EpisodeTurn] = field(default_factory=list)
    env_rewards: list[tuple[int, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, action: Action, turn: Turn, *, observed: bool) -> None:
        """Records a turn; its observation only if it is part of the context."""
        end = len(self.transcript.token_ids)
        assert isinstance(turn.observation, str), "OpenSession.step accepts no other"
        observation = turn.observation if observed else ""
        self.turns.append(EpisodeTurn(text=action.text, tokens=len(action.token_ids), end=end, observation=observation))
        self.env_rewards.append((end, float(turn.reward)))
        for name, value in turn.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value)


class MultiTurn:
    """Plays each episode of a group in a session of its own; `rollout.sampling.max_tokens` bounds all its turns."""

    def __init__(self, env: SessionEnv, policy: Policy) -> None:
        self._policy = policy
        self._sessions = Sessions(env, group_deadline_s=policy.config.group_deadline_s)

    async def play(self, task: Task, *, samples: int, greedy: bool, until: float) -> Played:
        """As the protocol `Rollout` has it. Raises: EngineError."""
        finished, failures, lost_tokens = list[PlayedEpisode](), list[EpisodeFailed](), 0

        async def play_one() -> None:
            nonlocal lost_tokens
            state, episode = _State(), None
            try:
                async with self._sessions.open(task, until=until) as session:
                    episode = await self._episode(task, session, state, greedy=greedy, until=until)
            except EpisodeFailed as error:
                failures.append(error)
            if episode is None:
                lost_tokens += state.transcript.action_tokens
            else:
                finished.append(episode)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(samples):
                tasks.create_task(play_one())
        return Played(finished, lost_tokens, failures[0] if failures else None)

    def close(self) -> None:
        """Ends the sessions' thread."""
        self._sessions.close()

    async def _episode(
        self, task: Task, session: OpenSession, state: _State, *, greedy: bool, until: float
    ) -> PlayedEpisode | None:
        """One episode; None when it was cut short at the deadline. Raises: EpisodeFailed, EngineError."""
        prompt_ids = self._policy.prompt_ids(session.prompt)
        state.transcript = transcript = Transcript.begin(prompt_ids)
        end = len(prompt_ids) + self._policy.config.sampling.max_tokens
        while True:
            room = end - len(transcript.token_ids)
            (completion,) = await self._policy.generate(
                transcript.token_ids, samples=1, greedy=greedy, until=until, max_tokens=room
            )
            transcript.add_action(completion)
            if completion.finish_reason == "abort":
                return None
            (text,) = self._policy.tokenizer.decode([completion.token_ids])
            action = Action(text, tuple(completion.token_ids), finish_reason=completion.finish_reason)
            turn = await session.step(action)
            assert isinstance(turn.observation, str), "OpenSession.step accepts no other"
            observation = [] if turn.done else self._policy.observation_ids(turn.observation)
            is_full = completion.finish_reason == "length" or len(transcript.token_ids) + len(observation) >= end
            state.add(action, turn, observed=not (turn.done or is_full))
            if turn.done or is_full:
                break
            transcript.add_observation(observation)
        view = Episode(
            prompt=session.prompt,
            reference=task.reference,
            info=task.info,
            turns=tuple(state.turns),
            prompt_tokens=len(prompt_ids),
            finish_reason=completion.finish_reason if turn.done else "length",
        )
        return PlayedEpisode(transcript, view, state.env_rewards, state.metrics)
