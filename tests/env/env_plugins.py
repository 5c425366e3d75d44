"""Envs and tools of a user, `env_plugins:<attribute>`."""

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from slipstream.env.base import Split, Task
from slipstream.env.tools.schema import Tool


class Constant:
    def __init__(self, *, word: str) -> None:
        self.word = word

    def size(self, split: Split) -> int:
        return 1 if split == "train" else 0

    def task(self, split: Split, index: int) -> Task:
        return Task(prompt="say it: ", reference=self.word)

    def fingerprint(self) -> str:
        return self.word


class Sized(Constant):
    """Of a given size in one of its splits."""

    def __init__(self, *, split: Split, size: object) -> None:
        super().__init__(word="yes")
        self.sizes = {"train": 1, "eval": 0, split: size}

    def size(self, split: Split) -> int:
        return self.sizes[split]  # type: ignore[return-value]


def without_tasks() -> object:
    return object()


def with_a_bug() -> Constant:
    return Constant(wrd="x")  # type: ignore[call-arg]  # the bug


def leaves() -> Constant:
    sys.exit(0)  # the bug


class Sizeless(Constant):
    def __init__(self) -> None:
        super().__init__(word="yes")

    def size(self, split: Split) -> int:
        return {"train": 1}[split]  # the bug


not_callable = 3


def shout(text: str) -> str:
    return text.upper()


SHOUT = Tool.from_function(shout, name="SHOUT")


class Repeater:
    def __init__(self, times: int) -> None:
        self.times = 2 // times * times

    def __call__(self, text: str) -> str:
        return text * self.times


class Box:
    tools = (Tool.from_function(shout, name="boxed"),)
    fingerprint = ""

    async def open(self, episode: AsyncExitStack) -> Sequence[Tool]:
        return self.tools
