"""The interface of reward runners, the runner inside this process, and the start of worker processes."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from typing import Protocol

from slipstream.configs.runtime.processes import guard_this_process
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, RewardFailed
from slipstream.rewards.compose import Reward, Scores, score_async, score_plain
from slipstream.rewards.registry import find_rewards


class Runner(Protocol):
    """Runs reward functions on one group at a time per slot."""

    @property
    def slots(self) -> int:
        """Groups that can be scored at once."""
        ...

    async def score(self, names: Sequence[str], episodes: Sequence[Episode]) -> Scores:
        """The scores of a group under these rewards. Raises: RewardFailed; the runner stays usable."""
        ...

    def close(self) -> None:
        """Ends what it has started, whatever runs in it."""
        ...


class InlineRunner:
    """Calls rewards in this process: plain ones in this thread and without a deadline, async ones in its event loop."""

    slots = 64

    def __init__(self, terms: Sequence[RewardConfig], *, deadline_s: float) -> None:
        """Raises: ConfigError if a reward can't be built."""
        self._rewards = find_rewards(terms)
        self._deadline_s = deadline_s

    async def score(self, names: Sequence[str], episodes: Sequence[Episode]) -> Scores:
        """As the protocol has it. Raises: RewardFailed; KeyError for another name."""
        rewards = [self._rewards[name] for name in names]
        scores = score_plain(rewards, episodes)
        try:
            async with asyncio.timeout(self._deadline_s):
                return scores | await score_async(rewards, episodes)
        except TimeoutError:
            raise late(names, self._deadline_s) from None

    def close(self) -> None:
        """Ends what the rewards have started."""
        close_rewards(self._rewards.values())


def close_rewards(rewards: Iterable[Reward]) -> None:
    """Calls `close()` of those rewards that have it, once the run ends; worker processes are killed instead."""
    for reward in rewards:
        close = getattr(reward.function, "close", None)
        if callable(close):
            close()


def late(names: Sequence[str], deadline_s: float) -> RewardFailed:
    """The failure of a group that is not scored at its deadline."""
    return RewardFailed("reward_timeout", f"{', '.join(names)}: no scores within scoring.deadline_s={deadline_s:g}")


def start_worker(
    work: Callable[[socket.socket, Sequence[RewardConfig], int], None], terms: Sequence[RewardConfig]
) -> tuple[socket.socket, SpawnProcess]:
    """Starts a process that runs `work(socket, terms, id of this process)`; returns the socket's other end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        # spawn: a fork would copy the engine's threads and locks.
        process = get_context("spawn").Process(target=work, args=(theirs, tuple(terms), os.getpid()), name="rewards")
        process.start()
    return ours, process


def load_in_worker(terms: Sequence[RewardConfig], server_id: int) -> Mapping[str, Reward]:
    """The rewards of a worker process, which ends with the process `server_id`. Raises: ConfigError."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C in the terminal
    guard_this_process(f"SLIPSTREAM_REWARDS={os.getpid()}-{time.time_ns()}", server_id)
    return find_rewards(terms)
