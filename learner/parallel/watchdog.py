"""The watchdog of the learner's ranks: it names a frozen rank, which the error of a collective does not."""

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

from slipstream.configs.runtime.logging import LogInterval, get_log
from slipstream.learner.parallel.mesh import World

log = get_log("learner.watchdog")

HEARTBEAT_S = 2.0
WARNING_S = 30.0
"""Between two warnings, and of silence before the first."""
LEFT = b"left"


@contextmanager
def watch_ranks(world: World, *, deadline_s: float) -> Iterator[None]:
    """Context in which this rank sends heartbeats and watches those of others; a collective.

    Exits the process when a rank has sent none for `deadline_s`, with an error that names it: a collective that waits
    for that rank can't be ended otherwise. Rank 0 watches all others, they watch rank 0; when one exits, torchrun ends
    the rest.
    """
    if world.size == 1:
        yield
        return
    # A connection of its own: another thread may block that of the rank.
    store: dist.Store = world.store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    own_key = _key(world.rank)
    store.set(own_key, "0")
    hosts = world.gather(socket.gethostname())  # from here on every rank's key exists
    watched = range(1, world.size) if world.is_root else [0]
    stop = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(store, own_key, watched, hosts, deadline_s, stop), name="watchdog", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(HEARTBEAT_S)
        with suppress(dist.DistError):  # the store's host has left already
            store.set(own_key, LEFT.decode())


def _watch(
    store: dist.Store, own: str, watched: Sequence[int], hosts: Sequence[str], deadline_s: float, stop: threading.Event
) -> None:
    keys = [_key(rank) for rank in watched]
    received, warning, beat = [b""] * len(keys), LogInterval(WARNING_S), 0
    # Counted in own heartbeats: the time in which this process itself was frozen must not count.
    silent_beats = [0] * len(keys)
    while not stop.wait(HEARTBEAT_S):
        beat += 1
        before = received
        try:
            store.set(own, str(beat))
            received = store.multi_get(keys)
        except dist.DistError:
            log.debug("the ranks' store does not answer")  # counts as silence of all
        for index, (old, new) in enumerate(zip(before, received, strict=True)):
            silent_beats[index] = silent_beats[index] + 1 if old == new != LEFT else 0
        silent_s = HEARTBEAT_S * max(silent_beats)
        rank = watched[silent_beats.index(max(silent_beats))]
        if silent_s > deadline_s:
            _exit(f"learner rank {rank} on {hosts[rank]} has been silent for learner.wait_deadline_s={deadline_s:g}")
        if silent_s > WARNING_S and warning.due():
            log.warning("a learner rank is silent", rank=rank, host=hosts[rank], for_s=round(silent_s))


def _exit(reason: str) -> None:
    log.error("learner failed", error=f"{reason}; start again: the run goes on from its last checkpoint")
    os._exit(1)


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
