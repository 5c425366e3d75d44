"""Whether the other ranks of a learner still run: a collective waits for a frozen one, and does not say for whom."""

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

from slipstream.configs.runtime.logging import LogInterval, get_log
from slipstream.learner.parallel.mesh import World

log = get_log("learner.pulse")

BEAT_S = 2.0
SAY_EVERY_S = 30.0
"""Of silence, too, before anything is said of it."""
LEFT = b"left"


@contextmanager
def pulse(world: World, *, deadline_s: float) -> Iterator[None]:
    """Meanwhile this rank tells the others that it runs; a collective.

    Its process ends when a rank has been silent for `deadline_s`, and says which: nothing else would get it out of the
    collective in which it waits. Rank 0 watches all others, they watch rank 0; whoever ends, torchrun ends the rest.
    """
    if world.size == 1:
        yield
        return
    # Through a connection of its own: on the ranks' another thread may be waiting for something.
    store: dist.Store = world.store.clone()  # type: ignore[attr-defined]  # torch's stubs don't know it
    own = _key(world.rank)
    store.set(own, "0")
    hosts = world.gather(socket.gethostname())  # from then on every rank can be asked for
    watched = range(1, world.size) if world.is_root else [0]
    ends = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(store, own, watched, hosts, deadline_s, ends), name="pulse", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join(BEAT_S)
        with suppress(dist.DistError):  # the store's host has left already
            store.set(own, LEFT.decode())


def _watch(
    store: dist.Store, own: str, watched: Sequence[int], hosts: Sequence[str], deadline_s: float, ends: threading.Event
) -> None:
    keys = [_key(rank) for rank in watched]
    heard, news, beat = [b""] * len(keys), LogInterval(SAY_EVERY_S), 0
    # In beats of its own: a rank that was frozen itself must not take that time for the others' silence.
    silent_beats = [0] * len(keys)
    while not ends.wait(BEAT_S):
        beat += 1
        before = heard
        try:
            store.set(own, str(beat))
            heard = store.multi_get(keys)
        except dist.DistError:
            log.debug("the ranks' store does not answer")  # so nobody is heard of
        for number, (was, now) in enumerate(zip(before, heard, strict=True)):
            silent_beats[number] = silent_beats[number] + 1 if was == now != LEFT else 0
        silent_s = BEAT_S * max(silent_beats)
        rank = watched[silent_beats.index(max(silent_beats))]
        if silent_s > deadline_s:
            _end(f"learner rank {rank} on {hosts[rank]} has been silent for learner.wait_deadline_s={deadline_s:g}")
        if silent_s > SAY_EVERY_S and news.due():
            log.warning("a learner rank is silent", rank=rank, host=hosts[rank], for_s=round(silent_s))


def _end(why: str) -> None:
    log.error("learner failed", error=f"{why}; start again: the run goes on from its last checkpoint")
    os._exit(1)


def _key(rank: int) -> str:
    return f"pulse/{rank}"
