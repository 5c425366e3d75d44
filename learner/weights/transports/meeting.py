"""Where the members of a transfer group meet before they connect to each other: a store that the learner keeps."""

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from slipstream.configs.errors import ConfigError
from slipstream.configs.schema.weights import WeightsConfig
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
