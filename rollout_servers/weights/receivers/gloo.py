"""Gloo between CPUs: the server is one rank of a group to which the learner broadcasts."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from slipstream.buffer.wire.weights.protocol import GLOO_BUCKETS_AT_ONCE, Announce, Form, gloo_buckets
from slipstream.configs.runtime.threads import Teardown, run_in_thread
from slipstream.rollout_servers.engines.base import UpdateFailed
from slipstream.rollout_servers.engines.staging import Staging, TransferFailed

CHECK_S = 0.02
LEARNER = "here/0"
"""Where the learner says what else the members need to know."""


def meet(group: Form, *, ranks: int, wanted: Callable[[], bool]) -> PrefixStore:
    """Says that so many ranks are here; how that goes stands with the learner's `Meeting`.

    Returns: the group's part of the store, once all are here.
    Raises: TransferFailed when they are not within the deadline, the learner gives the group up, or it isn't wanted.
    """
    timeout = timedelta(seconds=group.deadline_s)
    try:
        tcp = TCPStore(group.host, group.port, None, False, timeout, wait_for_workers=False)
        store = PrefixStore(f"epoch{group.epoch}", tcp)
        for rank in range(group.rank, group.rank + ranks):
            store.set(f"here/{rank}", "")
        _await_learner(store, group, wanted)
    except RuntimeError as error:
        raise TransferFailed(f"{named(group)} could not be entered: {error}") from None
    return store


async def meet_beside(group: Form, *, ranks: int) -> str:
    """What an engine's workers know the others by, once all are there: nothing else could end their wait.

    Raises: UpdateFailed.
    """
    left = threading.Event()

    def meet_all() -> str:
        return meet(group, ranks=ranks, wanted=lambda: not left.is_set()).get(LEARNER).decode()

    try:
        async with asyncio.timeout(group.deadline_s):
            return str(await run_in_thread(meet_all))
    except (TransferFailed, RuntimeError) as error:  # the learner, who keeps the store, may die at any moment
        raise UpdateFailed(str(error)) from None
    except TimeoutError:
        raise UpdateFailed(f"the others of transfer group {group.epoch} are not there") from None
    finally:
        left.set()


def named(group: Form) -> str:
    """What a transfer group is called in messages."""
    return f"transfer group {group.epoch} of the learner at {group.host}:{group.port}"


def _await_learner(store: PrefixStore, group: Form, wanted: Callable[[], bool]) -> None:
    """Raises: RuntimeError."""
    deadline = time.monotonic() + group.deadline_s
    while not store.check([LEARNER]):
        if not wanted():
            raise RuntimeError("it is not wanted any more")
        if store.check(["off"]):
            raise RuntimeError(f"the learner gave it up: {store.get('off').decode()}")
        if time.monotonic() >= deadline:
            raise RuntimeError(f"the learner did not enter it within {group.deadline_s:.0f} s")
        time.sleep(CHECK_S)


ENDS_S = 5.0
"""For a group's end when the process ends: a moment, unless somebody hangs in it."""


class GlooReceiver:
    """Receives buckets into host memory."""

    def __init__(self) -> None:
        self._group: Any = None
        self._form: Form | None = None
        self._wake = threading.Event()
        self._teardown = Teardown()

    def enter(self, group: Form) -> None:
        """Enters a transfer group; what still waits for an earlier one gives up."""
        self._leave()
        self._form = group
        store = meet(group, ranks=1, wanted=lambda: self._form is group)
        try:
            entered = ProcessGroupGloo(store, group.rank, group.world, timedelta(seconds=group.deadline_s))
        except RuntimeError as error:
            raise TransferFailed(f"{named(group)} could not be entered: {error}") from None
        if self._form is group:
            self._group = entered

    def receive(self, announce: Announce, staging: Staging) -> None:
        """Receives a version bucket by bucket."""
        group, manifest = self._form, announce.manifest
        if group is None or self._group is None or announce.epoch != group.epoch:
            raise TransferFailed(
                f"version {manifest.version} comes through transfer group {announce.epoch}, which was not entered"
            )
        data, held, arrived = staging.begin(manifest), [self._group], 0
        try:
            for arrived in self._buckets(held, data, announce):
                staging.arrived(arrived)
        except RuntimeError as error:
            self._leave()
            self._teardown.release(held)  # if it was left meanwhile, this is the last that holds it
            staging.abandon()  # gloo may still write there
            raise TransferFailed(
                f"version {manifest.version} did not come through {named(group)}: after {arrived} of "
                f"{data.numel()} bytes: {error}"
            ) from None
        staging.finish(manifest)

    def _buckets(self, held: list[Any], data: Tensor, announce: Announce) -> Iterator[int]:
        """Receives; yields after each bucket where it ends. Raises: RuntimeError, as torch does."""
        if held[0] is None:
            raise RuntimeError("the group was left")
        deadline = time.monotonic() + announce.deadline_s
        under_way: deque[tuple[Any, int]] = deque()
        for start, end in gloo_buckets(data.numel(), announce.manifest.bucket_bytes):
            if len(under_way) == GLOO_BUCKETS_AT_ONCE:
                yield self._received(*under_way.popleft(), deadline)
            under_way.append((held[0].broadcast(data[start:end], 0).get_future(), end))
        for bucket, end in under_way:
            yield self._received(bucket, end, deadline)

    def _received(self, bucket: Any, end: int, deadline: float) -> int:
        # Of this wait alone: what an earlier one still hears must not end it.
        self._wake = wake = threading.Event()
        bucket.add_done_callback(lambda _: wake.set())
        if self._group is not None:
            wake.wait(max(0.0, deadline - time.monotonic()))
        if not bucket.done():
            raise RuntimeError("the deadline passed" if self._group is not None else "the group was left")
        bucket.wait()
        return end

    def close(self) -> None:
        """Leaves the group; who waits in `enter` or `receive` is woken."""
        self._leave()
        self._wake.set()
        self._teardown.wait(ENDS_S)

    def _leave(self) -> None:
        held = [self._group]
        self._group = self._form = None
        # Not here: a group's end waits for what is under way in it, for as long as the deadline.
        self._teardown.release(held)
