"""Gloo between CPUs: the server is one rank of a group to which the learner broadcasts."""

import threading
import time
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from slipstream.buffer.wire.weights import Announce, Form
from slipstream.rollout_servers.weights.staging import Staging, TransferFailed

CHECK_S = 0.02


class GlooReceiver:
    """Receives buckets into host memory; how a group is entered stands with the learner's `GlooTransport`."""

    def __init__(self) -> None:
        self._group: Any = None
        self._form: Form | None = None
        self._wake = threading.Event()  # of one wait: what an earlier one still hears must not end a later one

    def enter(self, group: Form) -> None:
        """Enters a transfer group; what still waits for an earlier one gives up."""
        self._leave()
        self._form = group
        timeout = timedelta(seconds=group.deadline_s)
        try:
            tcp = TCPStore(group.host, group.port, None, False, timeout, wait_for_workers=False)
            store = PrefixStore(f"epoch{group.epoch}", tcp)
            store.set(f"here/{group.rank}", "")
            self._await_learner(store, group)
            entered = ProcessGroupGloo(store, group.rank, group.world, timeout)
        except RuntimeError as error:
            raise TransferFailed(f"{_named(group)} could not be entered: {error}") from None
        if self._form is group:
            self._group = entered

    def _await_learner(self, store: PrefixStore, group: Form) -> None:
        """Returns when all members are there. Raises: RuntimeError."""
        deadline = time.monotonic() + group.deadline_s
        while not store.check(["here/0"]):
            if self._form is not group:
                raise RuntimeError("it is not wanted any more")
            if store.check(["off"]):
                raise RuntimeError(f"the learner gave it up: {store.get('off').decode()}")
            if time.monotonic() >= deadline:
                raise RuntimeError(f"the learner did not enter it within {group.deadline_s:.0f} s")
            time.sleep(CHECK_S)

    def receive(self, announce: Announce, staging: Staging) -> None:
        """Receives a version bucket by bucket."""
        group, manifest = self._form, announce.manifest
        if group is None or self._group is None or announce.epoch != group.epoch:
            raise TransferFailed(
                f"version {manifest.version} comes through transfer group {announce.epoch}, which was not entered"
            )
        data = staging.begin(manifest)
        deadline = time.monotonic() + announce.deadline_s
        for start in range(0, data.numel(), manifest.bucket_bytes):
            try:
                self._broadcast(data[start : start + manifest.bucket_bytes], deadline)
                staging.arrived(start + manifest.bucket_bytes)
            except RuntimeError as error:
                self._leave()
                staging.abandon()  # gloo may still write there
                raise TransferFailed(
                    f"version {manifest.version} did not come through {_named(group)}: after {start} of "
                    f"{data.numel()} bytes: {error}"
                ) from None
        staging.finish(manifest)

    def _broadcast(self, bucket: Tensor, deadline: float) -> None:
        """Raises: RuntimeError, as torch does."""
        self._wake = threading.Event()
        held = [self._group]
        if held[0] is None:
            raise RuntimeError("the group was left")
        try:
            self._received(held[0].broadcast(bucket, 0).get_future(), deadline)
        except RuntimeError:
            _end(held)  # if it was left meanwhile, this is the last that holds it
            raise

    def _received(self, received: Any, deadline: float) -> None:
        wake = self._wake
        received.add_done_callback(lambda _: wake.set())
        wake.wait(max(0.0, deadline - time.monotonic()))
        if not received.done():
            raise RuntimeError("the deadline passed" if self._group is not None else "the group was left")
        received.wait()

    def close(self) -> None:
        """Leaves the group; who waits in `enter` or `receive` is woken."""
        self._leave()
        self._wake.set()

    def _leave(self) -> None:
        held = [self._group]
        self._group = self._form = None
        _end(held)


def _end(held: list[Any]) -> None:
    # In a thread: a group's end waits for what is under way in it, for as long as the deadline.
    threading.Thread(target=held.clear, name="gloo group ends", daemon=True).start()


def _named(group: Form) -> str:
    return f"transfer group {group.epoch} of the learner at {group.host}:{group.port}"
