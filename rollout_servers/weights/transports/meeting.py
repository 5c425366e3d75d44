"""Where the members of a transfer group meet before they connect to each other: a store that the learner keeps."""

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from slipstream.buffer.wire.weights import Form
from slipstream.configs.background import in_background
from slipstream.rollout_servers.engines.base import UpdateFailed
from slipstream.rollout_servers.weights.staging import TransferFailed

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
            return str(await in_background(meet_all))
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
