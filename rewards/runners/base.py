"""Reward runners: their interface, the runner inside this process, the start of worker processes and their messages."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from typing import Final, Protocol

import msgspec

from slipstream.configs.runtime.errors import SlipstreamError, format_error
from slipstream.configs.runtime.processes import guard_this_process
from slipstream.configs.runtime.tracing import AnySpan, span
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, Result
from slipstream.rewards.compose import OUT_OF_TIME, Call, Reward, run_all
from slipstream.rewards.registry import find_rewards


class Runner(Protocol):
    """Calls reward functions for one group at a time per slot."""

    @property
    def slots(self) -> int:
        """Groups that can be scored at once."""
        ...

    @property
    def rewards(self) -> Mapping[str, Reward]:
        """All rewards by name."""
        ...

    async def score(
        self, calls: Sequence[Call], episodes: Sequence[Episode], *, until: float | None = None
    ) -> list[list[Result]]:
        """The results of these calls; what has none at `until`, the event loop's time, fails."""
        ...

    def close(self) -> None:
        """Ends what it has started, whatever runs in it."""
        ...


class InlineRunner:
    """Calls rewards in this process: plain ones in this thread and without a limit, async ones in its event loop."""

    slots = 64

    def __init__(self, terms: Sequence[RewardConfig], *, deadline_s: float) -> None:
        """Raises: ConfigError if a reward can't be built."""
        self.rewards: Mapping[str, Reward] = find_rewards(terms, deadline_s=deadline_s)

    async def score(
        self, calls: Sequence[Call], episodes: Sequence[Episode], *, until: float | None = None
    ) -> list[list[Result]]:
        """As the protocol has it. Raises: KeyError for a name that is unknown."""
        plain = [call for call in calls if not self._is_async(call)]
        found = {call: self.rewards[call.name].run(chosen(call, episodes)) for call in plain}

        async def run(call: Call) -> None:
            reward = self.rewards[call.name]
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until), reward.slot(len(call.indices), until=until):
                    with call_span(call):
                        found[call] = await reward.run_async(chosen(call, episodes))

        await run_all([run(call) for call in calls if self._is_async(call)])
        return [found.get(call) or call.failed("scoring_timeout", f"{call.name}: {OUT_OF_TIME}") for call in calls]

    def close(self) -> None:
        """Ends what the rewards have started."""
        close_rewards(self.rewards.values())

    def _is_async(self, call: Call) -> bool:
        return self.rewards[call.name].is_async


def call_span(call: Call) -> AnySpan:
    """The span of a call."""
    return span("reward", reward=call.name, answers=len(call.indices))


def chosen(call: Call, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes of a call."""
    return [episodes[index] for index in call.indices]


def close_rewards(rewards: Iterable[Reward]) -> None:
    """Calls `close()` of those rewards that have it, once the run ends; worker processes are killed instead."""
    for reward in rewards:
        close = getattr(reward.function, "close", None)
        if callable(close):
            close()


def start_worker(
    work: Callable[[socket.socket, Sequence[RewardConfig], float, int], None],
    terms: Sequence[RewardConfig],
    deadline_s: float,
) -> tuple[socket.socket, SpawnProcess]:
    """Starts a process that runs `work`; returns the other end of its socket."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        # spawn: a fork would copy the engine's threads and locks.
        arguments = (theirs, tuple(terms), deadline_s, os.getpid())
        process = get_context("spawn").Process(target=work, args=arguments, name="rewards")
        process.start()
    return ours, process


def load_in_worker(terms: Sequence[RewardConfig], deadline_s: float, server_id: int) -> Mapping[str, Reward]:
    """The rewards of a worker process, which ends with the process `server_id`. Raises: ConfigError."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C in the terminal
    guard_this_process(f"SLIPSTREAM_REWARDS={os.getpid()}-{time.time_ns()}", server_id)
    return find_rewards(terms, deadline_s=deadline_s)


START_S: Final = 90.0  # a worker's interpreter and the plug-ins' imports
LENGTH_BYTES: Final = 8  # before each message


class ScoringRequest(msgspec.Struct, frozen=True, array_like=True):
    """Calls of rewards with the episodes of a group; each call has a reply, in this order."""

    calls: tuple[Call, ...]
    episodes: tuple[Episode, ...]


class ScoringReply(msgspec.Struct, frozen=True, array_like=True):
    """The results of one call; or an error instead, that of the request."""

    results: list[Result]
    error: str = ""


class WorkerEnded(SlipstreamError):
    """The process has ended, or can't be used further."""


class UnreadableInfo(SlipstreamError):
    """A task's info is beyond JSON values."""


# Not pickle: reading one runs code that its writer chose, and a reward can write into its process's socket.
_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(ScoringRequest)
_replies: Final = msgspec.msgpack.Decoder(ScoringReply)
_ENCODE_ERRORS: Final = (TypeError, ValueError, OverflowError, RecursionError)
_DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def framed(message: bytes) -> bytes:
    """The message behind its length."""
    return len(message).to_bytes(LENGTH_BYTES) + message


def encode_request(calls: Sequence[Call], episodes: Sequence[Episode]) -> bytes:
    """Calls for a worker. Raises: UnreadableInfo."""
    try:
        return _encoder.encode(ScoringRequest(tuple(calls), tuple(episodes)))
    except _ENCODE_ERRORS as error:
        raise _unreadable(error) from error


def decode_request(message: bytes) -> ScoringRequest:
    """The calls of a message. Raises: UnreadableInfo."""
    try:
        return _requests.decode(message)
    except _DECODE_ERRORS as error:  # such as a key that is no text
        raise _unreadable(error) from error


def encode_reply(results: list[Result]) -> bytes:
    """The reply with the results of a call."""
    return _encoder.encode(ScoringReply(results))


def encode_error(error: UnreadableInfo) -> bytes:
    """The reply to a request that can't be read."""
    return _encoder.encode(ScoringReply([], str(error)))


def decode_reply(message: bytes, size: int) -> list[Result]:
    """The results of a call with `size` episodes. Raises: UnreadableInfo; WorkerEnded for an invalid reply."""
    try:
        reply = _replies.decode(message)
    except _DECODE_ERRORS as error:  # rewards run in that process, and may write into its socket
        raise WorkerEnded(f"the worker process sent an invalid reply: {error}") from None
    if reply.error:
        raise UnreadableInfo(reply.error)
    if len(reply.results) != size:
        raise WorkerEnded("the worker process sent an invalid reply: not a result for each episode")
    return reply.results


def _unreadable(error: Exception) -> UnreadableInfo:
    return UnreadableInfo(f"the task's info must be plain JSON values: {format_error(error)}")
