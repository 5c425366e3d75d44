"""Gloo between CPUs: the server is one rank of a group to which the learner broadcasts."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroupGloo

from slipstream.buffer.wire.weights import GLOO_BUCKETS_AT_ONCE, Announce, Form, gloo_buckets
from slipstream.configs.endings import Endings
from slipstream.rollout_servers.weights.staging import Staging, TransferFailed
from slipstream.rollout_servers.weights.transports.meeting import meet, named

ENDS_S = 5.0
"""For a group's end when the process ends: a moment, unless somebody hangs in it."""


class GlooReceiver:
    """Receives buckets into host memory."""

    def __init__(self) -> None:
        self._group: Any = None
        self._form: Form | None = None
        self._wake = threading.Event()
        self._endings = Endings()

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
            self._endings.begin(held)  # if it was left meanwhile, this is the last that holds it
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
        self._endings.wait(ENDS_S)

    def _leave(self) -> None:
        held = [self._group]
        self._group = self._form = None
        # Not here: a group's end waits for what is under way in it, for as long as the deadline.
        self._endings.begin(held)
