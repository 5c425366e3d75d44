"""Gloo between CPUs: every bucket is broadcast once to all rollout servers of the group."""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from slipstream.buffer.wire.weights.protocol import GLOO_BUCKETS_AT_ONCE, gloo_buckets
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.threads import Teardown
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import TransferError

CHECK_S = 0.02
HERE = "here/0"
"""Where the learner says what the members need to know."""


class Meeting:
    """In the store under `epoch<n>` each member sets `here/<rank>`; the learner waits for all of them and sets
    `here/0`, to what they need to know, or `off` with the reason. Only then do they connect: that can't be broken off.
    """

    def __init__(self, config: WeightsConfig) -> None:
        """Listens. Raises: ConfigError when the address is taken or no address of this host."""
        self._deadline_s = config.deadline_s
        self._store: TCPStore | None = _listen(config)
        self._broken_off = threading.Event()

    def begin(self) -> None:
        """Another group is to be formed; `abort` counts from here on."""
        self._broken_off = threading.Event()

    def gather(self, epoch: int, world: int, *, word: Callable[[], str] = str) -> PrefixStore:
        """Returns once all of transfer group `epoch` are here and told the word, which is asked for only then.

        Raises: TransferError, also for what `word` raises.
        """
        assert self._store is not None, "gather() before close()"
        store = PrefixStore(f"epoch{epoch}", self._store)
        try:
            self._await_members(store, world)
            store.set(HERE, word())
        except TransferError as error:
            store.set("off", str(error))
            raise
        return store

    def _await_members(self, store: PrefixStore, world: int) -> None:
        absent = list(range(1, world))
        deadline = time.monotonic() + self._deadline_s
        while absent := [rank for rank in absent if not store.check([f"here/{rank}"])]:
            if self._broken_off.wait(CHECK_S):
                raise TransferError("entering the transfer group was broken off")
            if time.monotonic() >= deadline:
                raise TransferError(
                    f"rank {', '.join(map(str, absent))} of {world} did not enter the transfer group within "
                    f"{self._deadline_s:.0f} s (weights.deadline_s)",
                    absent=tuple(absent),
                )

    def abort(self) -> None:
        """Wakes whoever waits in `gather`, or comes there for this group."""
        self._broken_off.set()

    def close(self) -> None:
        """Stops listening."""
        self.abort()
        self._store = None


def _listen(config: WeightsConfig) -> TCPStore:
    # A socket of our own: the store would listen on every interface otherwise.
    ipv6 = ":" in config.bind
    try:
        listener = socket.create_server(
            (config.bind, config.store_port),
            family=socket.AF_INET6 if ipv6 else socket.AF_INET,
            backlog=1024,
            dualstack_ipv6=ipv6 and socket.has_dualstack_ipv6(),  # `::` stands for IPv4 too, as it does with ZeroMQ
        )
    except OSError as error:
        raise ConfigError(
            f"can't listen on {config.bind}:{config.store_port} (weights.bind, weights.store_port): {error.strerror}; "
            "stop what listens there, such as another learner, or choose another port"
        ) from None
    return TCPStore(
        config.bind,
        config.store_port,
        is_master=True,
        timeout=timedelta(seconds=config.deadline_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


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
        self._teardown = Teardown()

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
            self._teardown.release(held)  # if it was left meanwhile, this is the last that holds it
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
        self._teardown.wait(ENDS_S)

    def _leave(self) -> None:
        held = [self._group]
        self._group = None
        # Not here: a group's end waits for what is under way in it, for as long as the deadline.
        self._teardown.release(held)
