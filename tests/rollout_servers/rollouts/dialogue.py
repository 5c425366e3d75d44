"""An env of one task with scripted sessions."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.env.base import Action, Split, Task, Turn

HANG = object()


@dataclass
class Dialogue:
    """An env whose sessions return these turns; an exception is raised instead, and HANG blocks for ever."""

    turns: Sequence[Any] = (Turn("5+", 0.25, metrics={"hints": 1}), Turn("", 0.5, done=True, metrics={"hints": 2}))
    prompt: Any = "12r"
    actions: list[Action] = field(default_factory=list)
    opened: int = 0
    closed: int = 0
    closing: Any = None
    reference: str = "4"
    threads: set[threading.Thread] = field(default_factory=set)

    def size(self, split: Split) -> int:
        return 1

    def task(self, split: Split, index: int) -> Task:
        return Task(prompt="unused", reference=self.reference)

    def fingerprint(self) -> str:
        return "dialogue"

    def session(self, task: Task) -> "Script":
        self.opened += 1
        return Script(self)


class Script:
    def __init__(self, env: Dialogue) -> None:
        self.env = env
        self.turns = iter(env.turns)

    async def reset(self) -> Any:
        return await result(self.env.prompt)

    async def step(self, action: Action) -> Any:
        self.env.actions.append(action)
        return await result(next(self.turns))

    async def close(self) -> None:
        self.env.closed += 1
        self.env.threads.add(threading.current_thread())
        if self.env.closing is not None:
            await result(self.env.closing)


async def result(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value if value is not HANG else await asyncio.Future()
