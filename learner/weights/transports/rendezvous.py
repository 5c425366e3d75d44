"""The learner's side of a transfer group's rendezvous: the store, and the wait for all ranks."""

import socket
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from slipstream.buffer.wire.weights.fabric import RendezvousError, gather_ranks, store_prefix
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.transports.base import TransferError


class Rendezvous:
    """The store at `weights.store_port`, in which the ranks of each transfer group are gathered."""

    def __init__(self, config: WeightsConfig) -> None:
        """Listens. Raises: ConfigError when the address is taken or no address of this host."""
        self._deadline_s = config.deadline_s
        self._store: TCPStore | None = _listen(config)
        self._aborted = threading.Event()

    def begin(self) -> None:
        """Begins another group: `abort` counts from here on."""
        self._aborted = threading.Event()

    def gather(self, epoch: int, world: int, *, payload: Callable[[], str] = str) -> PrefixStore:
        """Returns once all ranks of transfer group `epoch` are there and have the payload, which is made only then.

        Raises: TransferError, also for what `payload` raises.
        """
        assert self._store is not None, "gather() before close()"
        store = PrefixStore(store_prefix(epoch), self._store)
        try:
            gather_ranks(store, world, deadline_s=self._deadline_s, aborted=self._aborted, payload=payload)
        except RendezvousError as error:
            raise TransferError(str(error), absent=error.absent) from None
        return store

    def abort(self) -> None:
        """Ends a wait in `gather`, also one that begins later for this group."""
        self._aborted.set()

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
