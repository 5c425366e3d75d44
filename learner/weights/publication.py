"""A published version, its recipients, and figures of its distribution."""

import asyncio
import time
from collections import deque
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

from slipstream.learner.weights.members import Member
from slipstream.learner.weights.snapshot import Snapshot

KEPT = 10_000
"""Most figures of each kind: a run may last weeks."""


@dataclass
class SyncFigures:
    """Figures of the latest publications; read by the training loop."""

    published_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """From the call of `publish` until each member of that moment had applied the version, or was evicted."""
    stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Pause of each server's generation."""
    deviations: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Deviation of each probe's log-probs, by which a server verified its engine's weights."""
    members: int = 0
    """Current members."""
    evictions: int = 0
    unreached: int = 0
    """Members at which broadcasts broke off, so that they fetch instead."""


@dataclass(eq=False)
class Publication:
    """One version, its recipients, and the transfers that read the learner's copy.

    Attributes:
        before: the version before it, as long as its memory is not reclaimed.
        members: the members of the moment of publication that have not applied it yet.
        done: done when `members` is empty.
    """

    snapshot: Snapshot
    before: "Publication | None" = None
    members: list[Member] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)
    readers: int = 0
    _sealed: Snapshot | None = None
    _sealing: asyncio.Lock = field(default_factory=asyncio.Lock)
    done: Future[None] = field(default_factory=Future)

    @property
    def version(self) -> int:
        """The version."""
        return self.snapshot.manifest.version

    def read(self) -> ExitStack:
        """Keeps the learner from overwriting the snapshot until the stack is closed."""

        def done() -> None:
            self.readers -= 1

        self.readers += 1
        reading = ExitStack()
        reading.callback(done)
        return reading

    def read_with_base(self) -> ExitStack:
        """The same for this version and the one before it, to which it has a difference."""
        reading = self.read()
        if self.before is not None:
            reading.enter_context(self.before.read())
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
        """True if each member has applied it or a later one, or is gone."""
        self.members = [m for m in self.members if not m.gone.is_set() and m.version < self.version]
        return not self.members
