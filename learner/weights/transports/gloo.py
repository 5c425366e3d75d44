"""Gloo between CPUs: every bucket is broadcast once to all rollout servers of the group."""

import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo

from slipstream.buffer.wire.weights import GLOO_BUCKETS_AT_ONCE, gloo_buckets
from slipstream.configs.endings import Endings
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import TransferError
from slipstream.learner.weights.transports.meeting import Meeting

ENDS_S = 5.0
"""For a group's end when the process ends: a moment, unless somebody hangs in it."""


class GlooTransport:
    """Broadcasts buckets of host memory."""

    name = "gloo"
    on_device = False

    def __init__(self, config: WeightsConfig) -> None:
        """Listens. Raises: ConfigError when the address is taken or no address of this host."""
        self._deadline_s = config.deadline_s
        self._meeting = Meeting(config)
        self._group: Any = None
        self._aborted = False
        self._wake = threading.Event()
        self._endings = Endings()

    def form(self, epoch: int, world: int) -> None:
        """Enters transfer group `epoch` as rank 0 of `world`."""
        self._meeting.begin()
        self._leave()
        self._aborted = False
        store = self._meeting.gather(epoch, world)
        try:
            self._group = ProcessGroupGloo(store, 0, world, timedelta(seconds=self._deadline_s))
        except RuntimeError as error:
            raise TransferError(f"the {world} of the transfer group could not connect to each other: {error}") from None

    def send(self, snapshot: Snapshot) -> None:
        """Broadcasts the version's bytes, bucket by bucket."""
        held = [self._group]
        try:
            self._send(held, snapshot)
        except RuntimeError as error:
            self._leave()  # what others still wait for there would be mistaken for the next version
            self._endings.begin(held)  # if it was left meanwhile, this is the last that holds it
            raise TransferError(f"version {snapshot.manifest.version} was not sent: {error}") from None

    def _send(self, held: list[Any], snapshot: Snapshot) -> None:
        """Raises: RuntimeError, as torch does."""
        if held[0] is None:
            raise RuntimeError("the transfer group was broken off")
        deadline = time.monotonic() + self._deadline_s
        under_way: deque[Any] = deque()
        for start, end in gloo_buckets(snapshot.data.numel(), snapshot.manifest.bucket_bytes):
            if len(under_way) == GLOO_BUCKETS_AT_ONCE:
                self._sent(under_way.popleft(), deadline)
            under_way.append(held[0].broadcast(snapshot.data[start:end], 0).get_future())
        for bucket in under_way:
            self._sent(bucket, deadline)

    def _sent(self, bucket: Any, deadline: float) -> None:
        # Of this wait alone: what an earlier one still hears must not end it.
        self._wake = wake = threading.Event()
        bucket.add_done_callback(lambda _: wake.set())
        if not self._aborted:
            wake.wait(max(0.0, deadline - time.monotonic()))
        if self._aborted:
            raise RuntimeError("broken off")
        if not bucket.done():
            raise RuntimeError(f"not received within {self._deadline_s:.0f} s (weights.deadline_s)")
        bucket.wait()

    def abort(self) -> None:
        """Wakes whoever waits in `form` or `send`; the group is of no use any more."""
        self._aborted = True
        self._meeting.abort()
        self._wake.set()

    def close(self) -> None:
        """Leaves the group and stops listening."""
        self.abort()
        self._leave()
        self._meeting.close()
        self._endings.wait(ENDS_S)

    def _leave(self) -> None:
        held = [self._group]
        self._group = None
        # Not here: a group's end waits for what is under way in it, for as long as the deadline.
        self._endings.begin(held)
