"""A version on its way to the rollout servers, and the figures of all that went before it."""

import asyncio
import time
from collections import deque
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

from slipstream.learner.weights.members import Member
from slipstream.learner.weights.snapshot import Snapshot

KEPT = 10_000
"""Figures of each kind, or they would grow as long as the run goes on."""


@dataclass
class SyncFigures:
    """How the latest publications went; read by the training loop."""

    published_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """From the call of `publish` until the last server that was there had applied the version, or was evicted."""
    stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """How long each server's generation stood still."""
    deviations: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """How far each probe's log-probs were off by which a server made sure that its engine holds the version."""
    members: int = 0
    """Rollout servers that are fed at the moment."""
    evictions: int = 0
    unreached: int = 0
    """Servers among the members that broadcasts broke off at, so that they fetch instead."""


@dataclass(eq=False)
class Publication:
    """One version, who is to get it, and who still reads the learner's copy of it.

    Attributes:
        members: who was there when it was published and has not applied it yet.
        free: done when this is the latest version and no transfer reads an older one's memory any more.
        done: done when nobody is left in `members`.
    """

    snapshot: Snapshot
    members: list[Member] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)
    readers: int = 0
    _sealed: Snapshot | None = None
    _sealing: asyncio.Lock = field(default_factory=asyncio.Lock)
    free: Future[None] = field(default_factory=Future)
    done: Future[None] = field(default_factory=Future)

    @property
    def version(self) -> int:
        """The version."""
        return self.snapshot.manifest.version

    def read(self) -> ExitStack:
        """Keeps the learner from overwriting the snapshot, from now on until the stack is closed."""

        def done() -> None:
            self.readers -= 1

        self.readers += 1
        reading = ExitStack()
        reading.callback(done)
        return reading

    @property
    def age_s(self) -> float:
        """Time since the call of `publish`."""
        return time.perf_counter() - self.since

    async def on_host(self) -> Snapshot:
        """The snapshot in host memory, with its checksums; made once, in a thread."""
        async with self._sealing:
            if self._sealed is None:
                self._sealed = await asyncio.to_thread(self.snapshot.sealed)
            return self._sealed

    def settled(self) -> bool:
        """Whether everyone has applied it or a later one, or is gone."""
        self.members = [m for m in self.members if not m.gone.is_set() and m.version < self.version]
        return not self.members
