"""The interface of reward runners, the runner inside this process, and the start of worker processes."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from typing import Protocol

from slipstream.configs.runtime.processes import guard_this_process
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
                    found[call] = await reward.run_async(chosen(call, episodes))

        await run_all([run(call) for call in calls if self._is_async(call)])
        return [found.get(call) or call.failed("scoring_timeout", f"{call.name}: {OUT_OF_TIME}") for call in calls]

    def close(self) -> None:
        """Ends what the rewards have started."""
        close_rewards(self.rewards.values())

    def _is_async(self, call: Call) -> bool:
        return self.rewards[call.name].is_async


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
