"""Episodes of several turns with a `Session` of the env: actions of the policy, observations as plain text."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from numbers import Real
from threading import Thread
from typing import Any

from slipstream.configs.runtime.errors import format_error
from slipstream.configs.runtime.logging import get_log
from slipstream.env.base import Action, Session, SessionEnv, Task, Turn
from slipstream.rewards.base import Episode, EpisodeTurn
from slipstream.rollout_servers.rollouts.base import EpisodeFailed, Played, PlayedEpisode, Policy, Transcript

log = get_log("rollout.session")

CLOSE_S = 10.0
"""How long an episode waits for its session to close."""


class SessionThread:
    """An event loop in a thread of its own: a session that blocks must not delay the server's heartbeats."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._run, name="sessions", daemon=True).start()

    def submit(self, function: Callable[..., Awaitable[Any]], *arguments: object) -> "Future[Any]":
        """Starts a call, whose error is an EpisodeFailed (`env_error`)."""
        return asyncio.run_coroutine_threadsafe(_guarded(function, arguments), self._loop)

    def close(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_all(asyncio.all_tasks(self._loop)))
        self._loop.close()


async def _cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _guarded(function: Callable[..., Awaitable[Any]], arguments: Sequence[object]) -> Any:
    try:
        return await function(*arguments)
    # User code may raise anything; a SystemExit or a KeyboardInterrupt would end the thread's loop.
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise EpisodeFailed("env_error", format_error(error)) from error


@dataclass
class _State:
    """An episode while it is played."""

    sessions: list[Session] = field(default_factory=list)
    """The session, once it is opened."""
    transcript: Transcript = field(default_factory=lambda: Transcript.begin([]))
    turns: list[EpisodeTurn] = field(default_factory=list)
    env_rewards: list[tuple[int, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, action: Action, turn: Turn, *, observed: bool) -> None:
        """Records a turn; its observation only where the policy has seen it."""
        end = len(self.transcript.token_ids)
        observation = turn.observation if observed else ""
        self.turns.append(EpisodeTurn(text=action.text, tokens=len(action.token_ids), end=end, observation=observation))
        self.env_rewards.append((end, float(turn.reward)))
        for name, value in turn.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value)


class MultiTurn:
    """Plays each episode of a group in a session of its own; `rollout.sampling.max_tokens` bounds all its turns."""

    def __init__(self, env: SessionEnv, policy: Policy) -> None:
        self._env = env
        self._policy = policy
        self._thread = SessionThread()

    async def play(self, task: Task, *, samples: int, greedy: bool, until: float) -> Played:
        """As the protocol `Rollout` has it. Raises: EngineError."""
        finished, failures, lost_tokens = list[PlayedEpisode](), list[EpisodeFailed](), 0

        async def one() -> None:
            nonlocal lost_tokens
            state = _State()
            try:
                episode = await self._episode(task, state, greedy=greedy, until=until)
            except EpisodeFailed as error:
                failures.append(error)
                episode = None
            finally:
                await self._close(state)
            if episode is None:
                lost_tokens += state.transcript.action_tokens
            else:
                finished.append(episode)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(samples):
                tasks.create_task(one())
        return Played(finished, lost_tokens, failures[0] if failures else None)

    def close(self) -> None:
        """Ends the sessions' thread."""
        self._thread.close()

    async def _episode(self, task: Task, state: _State, *, greedy: bool, until: float) -> PlayedEpisode | None:
        """One episode; None when it was cut short at the deadline."""
        prompt = await self._call(until, self._open, task, state.sessions)
        prompt_ids = self._policy.prompt_ids(prompt)
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
            turn = _checked(await self._call(until, state.sessions[0].step, action))
            observation = [] if turn.done else self._policy.observation_ids(turn.observation)
            full = completion.finish_reason == "length" or len(transcript.token_ids) + len(observation) >= end
            state.add(action, turn, observed=not (turn.done or full))
            if turn.done or full:
                break
            transcript.add_observation(observation)
        finish_reason = completion.finish_reason if turn.done else "length"
        view = Episode(
            prompt=prompt,
            reference=task.reference,
            info=task.info,
            turns=tuple(state.turns),
            prompt_tokens=len(prompt_ids),
            finish_reason=finish_reason,
        )
        return PlayedEpisode(transcript, view, state.env_rewards, state.metrics)

    async def _open(self, task: Task, sessions: list[Session]) -> Any:
        sessions.append(self._env.session(task))
        return await sessions[0].reset()

    async def _call(self, until: float, function: Callable[..., Awaitable[Any]], *arguments: object) -> Any:
        """The result of a session's method. Raises: EpisodeFailed (`env_error`)."""
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.wrap_future(self._thread.submit(function, *arguments))
        except TimeoutError:
            detail = f"no observation within rollout.group_deadline_s={self._policy.config.group_deadline_s:g}"
            raise EpisodeFailed("env_error", detail) from None

    async def _close(self, state: _State) -> None:
        """Closes the session, also when this task is cancelled while it waits for that."""

        async def close() -> None:
            for session in state.sessions:
                await session.close()

        closing = asyncio.wrap_future(self._thread.submit(close))
        done, _ = await asyncio.wait([closing], timeout=CLOSE_S)
        error = closing.exception() if done else f"not closed within {CLOSE_S:g} s"
        if error is not None:
            log.warning("session not closed", error=str(error))


def _checked(turn: object) -> Turn:
    """Raises: EpisodeFailed for what is no Turn that can be trained on."""
    if not isinstance(turn, Turn) or not isinstance(turn.observation, str) or not isinstance(turn.metrics, Mapping):
        detail = f"step returned {repr(turn)[:200]}, which is no Turn with a text as observation"
        raise EpisodeFailed("env_error", detail)
    numbers: list[object] = [turn.reward, *turn.metrics.values()]
    for number in numbers:
        if not isinstance(number, Real) or not math.isfinite(number):
            raise EpisodeFailed("env_error", f"step returned {number!r} as reward or metric, which is no finite number")
    return turn
