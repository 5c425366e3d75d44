"""The rollout server's side of a transfer group's rendezvous."""

import asyncio
import threading
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from slipstream.buffer.wire.weights.fabric import LEARNER, RendezvousError, join_ranks, store_prefix
from slipstream.buffer.wire.weights.protocol import Form
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.rollout_servers.engines.base import UpdateFailed
from slipstream.rollout_servers.engines.staging import TransferFailed


def join_rendezvous(form: Form, *, ranks: int, left: threading.Event) -> PrefixStore:
    """Announces `ranks` ranks of this server and waits for all others. Returns the epoch's part of the store.

    Raises: TransferFailed when others are missing at the deadline, the learner gives up, or `left` is set.
    """
    timeout = timedelta(seconds=form.deadline_s)
    try:
        tcp = TCPStore(form.host, form.port, None, False, timeout, wait_for_workers=False)
        store = PrefixStore(store_prefix(form.epoch), tcp)
        join_ranks(store, range(form.rank, form.rank + ranks), deadline_s=form.deadline_s, left=left)
    except (RendezvousError, RuntimeError) as error:
        raise TransferFailed(f"{describe(form)} could not be entered: {error}") from None
    return store


async def await_rendezvous(form: Form, *, ranks: int) -> str:
    """Joins for an engine's workers, whose own wait nothing could end. Returns the id with which they connect.

    Raises: UpdateFailed.
    """
    left = threading.Event()

    def join() -> str:
        return join_rendezvous(form, ranks=ranks, left=left).get(LEARNER).decode()

    try:
        async with asyncio.timeout(form.deadline_s):
            return str(await run_in_thread(join))
    except (TransferFailed, RuntimeError) as error:  # the learner, which has the store, may crash
        raise UpdateFailed(str(error)) from None
    except TimeoutError:
        raise UpdateFailed(f"other members of transfer group {form.epoch} are missing") from None
    finally:
        left.set()


def describe(form: Form) -> str:
    """A transfer group's name in messages."""
    return f"transfer group {form.epoch} of the learner at {form.host}:{form.port}"
