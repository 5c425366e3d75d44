"""Rewards of a user, `reward_plugins:<attribute>`; worker processes import them too."""

import asyncio
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.rewards.base import Episode, Score, group_reward

Info = Mapping[str, Any]
loops = set[asyncio.AbstractEventLoop]()


class MakesFolder:
    """Makes a folder wherever it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def sends_a_pickle(answer: str, reference: str, info: Info) -> float:
    return sends_instead(pickle.dumps(MakesFolder(answer)))


def sends_other_scores(answer: str, reference: str, info: Info) -> float:
    return sends_instead(msgspec.msgpack.encode([[{"value": 1.0}] * 2]))


def sends_instead(message: bytes) -> float:
    """Writes a message in place of the reply, into every socket of this process."""
    for file in list(Path("/proc/self/fd").iterdir()):
        if file.is_socket():
            os.write(int(file.name), len(message).to_bytes(8) + message)
    return 1.0


def process_id(answer: str, reference: str, info: Info) -> float:
    return os.getpid()


def difference(answer: str, reference: str, info: Info) -> float:
    return abs(int(answer) - int(reference)) * float(info.get("scale", 1))


def raises_a_timeout(answer: str, reference: str, info: Info) -> float:
    raise TimeoutError("the judge did not answer")


def raises_what_can_not_be_pickled(answer: str, reference: str, info: Info) -> float:
    raise type("LocalError", (Exception,), {})(threading.Lock())


class Panic(BaseException):
    """As a panic of a library in Rust: no Exception, and not picklable."""

    def __reduce__(self) -> str:
        raise ValueError("stays here")


class Mute(Exception):
    def __str__(self) -> str:
        return self.args[0]  # type: ignore[no-any-return]  # as many do, whatever it is


def panics(answer: str, reference: str, info: Info) -> float:
    raise Panic("index out of bounds")


def interrupts(answer: str, reference: str, info: Info) -> float:
    raise KeyboardInterrupt


def raises_what_can_not_be_read(answer: str, reference: str, info: Info) -> float:
    raise Mute(404)


def leaves(answer: str, reference: str, info: Info) -> float:
    sys.exit(3)


def cancels(answer: str, reference: str, info: Info) -> float:
    raise asyncio.CancelledError


def hangs_if_asked(answer: str, reference: str, info: Info) -> float:
    if answer == "hang":
        threading.Event().wait()
    return 1.0


def starts_others_and_hangs(answer: str, reference: str, info: Info) -> float:
    """Names all processes in the file that the answer names."""
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    near, far = subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)
    if (copy := os.fork()) != 0:
        Path(answer).write_text(f"{os.getpid()} {near.pid} {far.pid} {copy}\n")
    while True:
        time.sleep(600)


def dies_if_asked(answer: str, reference: str, info: Info) -> float:
    if answer == "die":
        os._exit(7)
    return 1.0


def takes_a_while(answer: str, reference: str, info: Info) -> float:
    time.sleep(0.2)
    return 1.0


def sticks_in_c_if_asked(answer: str, reference: str, info: Info) -> float:
    if answer == "hang":
        sum(itertools.repeat(0))  # no handler of a signal is called meanwhile
    return 1.0


def forks_and_lets_the_copy_return(answer: str, reference: str, info: Info) -> float:
    os.fork()
    return float(answer)


async def judged(episode: Episode) -> Score:
    await asyncio.sleep(0)
    return Score(1.0, {"tokens": episode.tokens})


async def counts_event_loops(episode: Episode) -> float:
    loops.add(asyncio.get_running_loop())
    return len(loops)


async def hangs_in_the_loop_if_asked(answer: str, reference: str, info: Info) -> float:
    if answer == "hang":
        await asyncio.Event().wait()
    return 1.0


async def blocks_the_loop_if_asked(answer: str, reference: str, info: Info) -> float:
    if answer == "block":
        threading.Event().wait()
    if answer == "wait":
        await asyncio.Event().wait()
    return 1.0


async def dies_in_the_loop_if_asked(answer: str, reference: str, info: Info) -> float:
    return dies_if_asked(answer, reference, info)


@group_reward
def rank(episodes: Sequence[Episode]) -> list[float]:
    ranked = sorted(episode.answer for episode in episodes)
    return [ranked.index(episode.answer) for episode in episodes]


def runs_its_own_loop(answer: str, reference: str, info: Info) -> float:
    return asyncio.run(asyncio.sleep(0, 1.0))
