"""Transfer groups: the rendezvous of the learner and the rollout servers, and gloo's broadcasts between them.

Without torch: its stores and process groups are passed in. Under `epoch<n>` of the learner's store each rank sets
`here/<rank>`. The learner (rank 0) waits for all and sets `here/0` to what they need to connect, or `off` to the reason
why there will be no group. Only then do they connect, because connecting can't be interrupted.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from slipstream.buffer.wire.weights.layout import GLOO_BUCKETS_AT_ONCE, gloo_buckets
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.threads import Teardown

CHECK_S = 0.02
LEARNER = "here/0"
"""Key of what the other ranks need to connect."""
OFF = "off"
TEARDOWN_S = 5.0
"""Most time for the destruction of process groups at the end of the process: short, unless a peer hangs."""


class TransferError(SlipstreamError):
    """A transfer broke off or did not begin; on a rollout server, the engine is unchanged.

    Attributes:
        absent: the ranks that never entered the transfer group, where that is known.
    """

    def __init__(self, message: str, absent: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.absent = absent


class Store(Protocol):
    """A key-value store of torch's, limited to one epoch."""

    def set(self, key: str, value: str) -> Any:
        """Sets a key."""
        ...

    def get(self, key: str) -> bytes:
        """The value of a key."""
        ...

    def check(self, keys: list[str]) -> bool:
        """True if all keys are set."""
        ...


def store_prefix(epoch: int) -> str:
    """The prefix of an epoch's keys in the learner's store."""
    return f"epoch{epoch}"


def gather_ranks(
    store: Store, world: int, *, deadline_s: float, aborted: threading.Event, payload: Callable[[], str] = str
) -> None:
    """Learner: waits for ranks [1, world) and publishes the payload, which is made only then.

    Raises: TransferError, and what `payload` raises.
    """
    try:
        _await_ranks(store, world, deadline_s, aborted)
        store.set(LEARNER, payload())
    except SlipstreamError as error:
        store.set(OFF, str(error))
        raise


def _await_ranks(store: Store, world: int, deadline_s: float, aborted: threading.Event) -> None:
    absent = list(range(1, world))
    deadline = time.monotonic() + deadline_s
    while absent := [rank for rank in absent if not store.check([f"here/{rank}"])]:
        if aborted.wait(CHECK_S):
            raise TransferError("entering the transfer group was aborted")
        if time.monotonic() >= deadline:
            raise TransferError(
                f"rank {', '.join(map(str, absent))} of {world} did not enter the transfer group within "
                f"{deadline_s:.0f} s (weights.deadline_s)",
                absent=tuple(absent),
            )


def join_ranks(store: Store, ranks: range, *, deadline_s: float, left: threading.Event) -> None:
    """Rollout server: announces its ranks and waits for the learner.

    Raises: TransferError when the learner gives the group up or is late, or the group was left.
    """
    for rank in ranks:
        store.set(f"here/{rank}", "")
    deadline = time.monotonic() + deadline_s
    while not store.check([LEARNER]):
        if store.check([OFF]):
            raise TransferError(f"the learner gave it up: {store.get(OFF).decode()}")
        if time.monotonic() >= deadline:
            raise TransferError(f"the learner did not enter it within {deadline_s:.0f} s")
        if left.wait(CHECK_S):
            raise TransferError("the group was left")


class GlooFabric:
    """One rank's gloo process group and the broadcasts through it.

    The group stands in a list, whose last reference is dropped in a thread: its destructor waits for what is in flight,
    up to the deadline.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._left = threading.Event()
        self._wake = threading.Event()
        self._teardown = Teardown()

    @property
    def entered(self) -> bool:
        """True if there is a group."""
        return bool(self._held)

    def enter(self, connect: Callable[[threading.Event], Any]) -> None:
        """Replaces the group by the one that `connect` returns; its argument is set when the group is left.

        Raises: RuntimeError when it was left meanwhile, and what `connect` raises.
        """
        self.leave()
        self._left = left = threading.Event()
        held = [connect(left)]
        if left.is_set():
            self._teardown.release(held)
            raise RuntimeError("the group was left")
        self._held = held

    def broadcast(self, data: Any, bucket_bytes: int, deadline_s: float) -> Iterator[int]:
        """Sends or receives a tensor of bytes from rank 0; yields the end of each bucket that is complete.

        Raises: RuntimeError, as torch does; then the group was left, as later buckets would be taken for the next
        version's.
        """
        held, left = [*self._held], self._left
        try:
            yield from self._buckets(held, left, data, bucket_bytes, deadline_s)
        except RuntimeError:
            if self._left is left:
                self.leave()
            raise
        finally:
            if left.is_set():
                self._teardown.release(held)  # perhaps the last reference

    def _buckets(
        self, held: list[Any], left: threading.Event, data: Any, bucket_bytes: int, deadline_s: float
    ) -> Iterator[int]:
        if not held or left.is_set():
            raise RuntimeError("the group was left")
        deadline = time.monotonic() + deadline_s
        inflight: deque[tuple[Any, int]] = deque()
        for start, end in gloo_buckets(data.numel(), bucket_bytes):
            if len(inflight) == GLOO_BUCKETS_AT_ONCE:
                yield self._wait(*inflight.popleft(), deadline, left)
            inflight.append((held[0].broadcast(data[start:end], 0).get_future(), end))
        for bucket, end in inflight:
            yield self._wait(bucket, end, deadline, left)

    def _wait(self, bucket: Any, end: int, deadline: float, left: threading.Event) -> int:
        # One event per wait: a late completion of an earlier bucket must not end this one.
        self._wake = wake = threading.Event()
        bucket.add_done_callback(lambda _: wake.set())
        if not left.is_set():
            wake.wait(max(0.0, deadline - time.monotonic()))
        if left.is_set():
            raise RuntimeError("the group was left")
        if not bucket.done():
            raise RuntimeError("a bucket was not received by the deadline (weights.deadline_s)")
        bucket.wait()
        return end

    def leave(self) -> None:
        """Leaves the group and wakes whoever waits in `enter` or `broadcast`."""
        self._left.set()
        self._wake.set()
        held, self._held = self._held, []
        if held:
            self._teardown.release(held)

    def close(self) -> None:
        """Leaves the group and joins the threads that destroy groups."""
        self.leave()
        self._teardown.wait(TEARDOWN_S)
