"""Live events of a run for any number of clients: its files are followed once, each record is serialised once."""

import asyncio
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

from anyio.to_thread import run_sync

from slipstream.tools.dashboard.runs import Run
from slipstream.tools.follow import LineFollower, Record, json_bytes, parse_line

POLL_S: Final = 0.25
STATE_EVERY: Final = 8
"""Polls between two looks at state and servers."""
QUEUE: Final = 256
"""Most parts that a slow client may be behind; it is cut off then, and resumes from the files when it is back."""
RETRY: Final = b"retry: 1000\n\n"
"""Browsers connect again after this many milliseconds."""


@dataclass(frozen=True)
class Position:
    """Place in the files up to which a client has everything: offsets in bytes, as an event's `id` `metrics.events`."""

    metrics: int
    events: int

    def __str__(self) -> str:
        return f"{self.metrics}.{self.events}"

    @classmethod
    def parse(cls, text: str, end: "Position") -> "Position":
        """The position of an id; the end where it is none, or lacks a part."""
        found = re.fullmatch(r"(\d{1,18})(?:\.(\d{1,18}))?", text)
        if found is None:
            return end
        return cls(int(found[1]), end.events if found[2] is None else int(found[2]))


class Feed:
    """The live events of one run. Follows its files while there are clients."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._clients: set[asyncio.Queue[bytes | None]] = set()
        self._files: _Files | None = None
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        """Held while the files are read and while a client joins: it gets each record once."""

    async def events(self, after: str) -> AsyncGenerator[bytes, None]:
        """Server-sent events, without an end: state and servers, what came after the given id, and all that comes."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE)
        async with self._lock:
            if self._files is None or self._task is None or self._task.done():
                self._files = await run_sync(_Files, self._run)
                await run_sync(self._files.state)
                self._task = asyncio.create_task(self._follow(self._files))
            here = self._files.position
            self._clients.add(queue)
        try:
            yield RETRY + await run_sync(_Files(self._run, here).state)
            start = Position.parse(after, here)
            if start.metrics > here.metrics or start.events > here.events:
                yield _event("reset", {}, here)  # the run was started over
            else:
                missed, before = _Files(self._run, start), None
                while missed.precedes(here) and missed.position != before:  # a file that was cut has no more
                    before = missed.position
                    yield await run_sync(missed.records, here)
            while (part := await queue.get()) is not None:
                yield part
        finally:
            self._clients.discard(queue)
            if not self._clients and self._task is not None:
                self._task.cancel()
                self._files = self._task = None

    async def _follow(self, files: "_Files") -> None:
        polls = 0
        try:
            while True:
                await asyncio.sleep(POLL_S)
                polls += 1
                async with self._lock:
                    part = await run_sync(files.records)
                    if polls % STATE_EVERY == 0:
                        part += await run_sync(files.state)
                    for queue in [*self._clients] if part else []:
                        if queue.full():
                            self._cut_off(queue)
                        else:
                            queue.put_nowait(part)
        finally:
            for queue in [*self._clients]:
                self._cut_off(queue)

    def _cut_off(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Ends a client's stream after what it has got so far: it asks for all that came later."""
        self._clients.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)


class _Files:
    """The followed files of a run; used by one thread at a time."""

    def __init__(self, run: Run, start: Position | None = None) -> None:
        """Starts at the end of the last complete lines, unless told where."""
        self._run = run
        self._metrics = LineFollower(run.folder.metrics, 0 if start is None else start.metrics)
        self._events = LineFollower(run.folder.events, 0 if start is None else start.events)
        if start is None:
            self._metrics.skip()
            self._events.skip()
        self._servers_at: float | None = None
        self._state = ""

    @property
    def position(self) -> Position:
        return Position(self._metrics.offset, self._events.offset)

    def precedes(self, end: Position) -> bool:
        """True while records up to `end` are left."""
        return self._metrics.offset < end.metrics or self._events.offset < end.events

    def records(self, end: Position | None = None) -> bytes:
        """Events of what was appended up to `end`; a part of them where they are many, empty where there are none."""
        replaced = self._metrics.replaced + self._events.replaced
        events_before = self._events.offset
        metrics = _records(self._metrics, None if end is None else end.metrics)
        events = _records(self._events, None if end is None else end.events)
        if self._metrics.replaced + self._events.replaced > replaced:
            return _event("reset", {}, self.position)
        here = self._metrics.offset
        parts = [_event(str(record.get("kind")), record, Position(offset, events_before)) for offset, record in metrics]
        parts += [_event("event", record, Position(here, offset)) for offset, record in events]
        return b"".join(parts)

    def state(self) -> bytes:
        """Events of state and servers, where they changed."""
        parts = []
        state, servers_at = self._run.state, self._run.servers_at
        if state != self._state:
            self._state = state
            parts.append(_event("state", {"state": state}))
        if servers_at != self._servers_at:
            self._servers_at = servers_at
            parts.append(_event("servers", self._run.servers()))
        return b"".join(parts)


def _records(follower: LineFollower, end: int | None) -> list[tuple[int, Record]]:
    """The next records, each with the offset after its line; only those that end at most at `end`."""
    if end is not None and follower.offset >= end:
        return []
    lines = follower.lines()
    offset = follower.offset - sum(len(line) + 1 for line in lines)
    found = []
    for line in lines:
        offset += len(line) + 1
        if (end is None or offset <= end) and (record := parse_line(line)) is not None:
            found.append((offset, record))
    return found


def _event(kind: str, data: Any, position: Position | None = None) -> bytes:
    """One event; without a position, clients keep that of the event before."""
    name = kind if kind.isidentifier() else "other"
    place = "" if position is None else f"id: {position}\n"
    return f"{place}event: {name}\ndata: ".encode() + json_bytes(data) + b"\n\n"  # JSON has no raw line ends
