"""One version of the weights on its way to the rollout servers."""

import asyncio
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

from slipstream.configs.schema.weights import TRANSPORTS
from slipstream.learner.weights.members import Member
from slipstream.learner.weights.snapshot import Snapshot


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

    async def for_transport(self, name: str) -> Snapshot:
        """The snapshot where a transport reads it."""
        return self.snapshot if TRANSPORTS[name].on_device else await self.on_host()

    def settled(self) -> bool:
        """True if each member has applied it or a later one, or is gone."""
        self.members = [m for m in self.members if not m.gone.is_set() and m.version < self.version]
        return not self.members
