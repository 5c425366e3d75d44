"""The learner's halves of the weight transports: interfaces, whose calls block; choice; rendezvous of broadcasts."""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, Self

import torch
from torch.distributed import PrefixStore, TCPStore

from slipstream.buffer.wire.weights.fabric import gather_ranks, store_prefix
from slipstream.buffer.wire.weights.protocol import Source
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.weights import TRANSPORTS, SecurityConfig, Transport, WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot

log = get_log("learner.weights")


@dataclass(frozen=True)
class SenderSettings:
    """Configuration of a sender.

    Attributes:
        folder: the run's folder of versions that are passed as files.
        full_every: `weights.full_every`, or 1 where versions are always sent whole.
    """

    weights: WeightsConfig
    security: SecurityConfig
    folder: Path
    full_every: int


class Sender(Protocol):
    """The data plane: members fetch a version from a source, or it is broadcast to a process group of them."""

    @classmethod
    def build(cls, settings: SenderSettings) -> Self:
        """Listens, or makes folders. Raises: ConfigError when a port is taken or a folder can't be written to."""
        ...

    @staticmethod
    def obstacle(run: str) -> str | None:
        """The reason why this process can't send so, with a remedy; None if it can."""
        return None

    def close(self) -> None:
        """Frees ports, files and memory."""
        ...


class Fetched(Sender, Protocol):
    """A transport from which each member fetches at its own pace."""

    @property
    def chained(self) -> bool:
        """True if a version is sent as a difference, and so must be prepared before the one before it is released."""
        ...

    def prepare(self, snapshot: Snapshot) -> None:
        """Makes a version ready to be fetched, which may go on until its `release`. Raises: TransferError."""
        ...

    def release(self, version: int) -> None:
        """Stops reading a version's snapshot, whose memory will be overwritten; never during `prepare`."""
        ...

    def source(self, snapshot: Snapshot, staged: int) -> Source:
        """Source of the prepared version for a member that holds the bytes of version `staged` (-1: none)."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes that the learner has sent so far; 0 where members read its memory or files."""
        ...


class Broadcast(Sender, Protocol):
    """A transport that sends to all members of a group at once, within `weights.deadline_s`."""

    name: str
    """Its name among `TRANSPORTS`."""
    on_device: bool
    """True if snapshots must lie in the accelerator's memory."""

    def form(self, epoch: int, world: int) -> None:
        """Enters transfer group `epoch` as rank 0 of `world`; returns once all ranks have. Raises: TransferError."""
        ...

    def send(self, snapshot: Snapshot) -> None:
        """Sends a version to all members of the group. Raises: TransferError."""
        ...

    def abort(self) -> None:
        """Ends calls that block in other threads, as far as the transport can."""
        ...


@dataclass(frozen=True)
class Transports:
    """Transports of a learner."""

    order: Sequence[str]
    """Names of all, the preferred one first."""
    fetched: Mapping[str, Fetched]
    """The transports that members fetch from, by name."""
    broadcast: Broadcast | None

    def close(self) -> None:
        """Frees ports, files and memory of all."""
        for transport in self.fetched.values():
            transport.close()
        if self.broadcast is not None:
            self.broadcast.close()


def offered_transports(weights: WeightsConfig, *, run: str, direct: str | None) -> list[Transport]:
    """The transports of this learner, the preferred one first; then those for servers that a transport does not reach.

    Args:
        direct: name of the transport straight into the engine, if it may be used.

    Raises: ConfigError when this learner can't send through the transport.
    """
    name, possible = weights.transport, weights.possible
    if name == "auto":
        device = "learner with a GPU" if torch.cuda.is_available() else "learner without a GPU"
        possible = [transport for transport in possible if transport.auto in (device, "any learner")]
        possible = [transport for transport in possible if not transport.direct or transport.name == direct]
    else:
        possible = [next((transport for transport in possible if transport.name == direct), possible[0])]
    offered = []
    for transport in possible:
        sender: type[Sender] = resolve_name(transport.sender)
        if (obstacle := sender.obstacle(run)) is None:
            offered.append(transport)
        elif name != "auto":
            raise ConfigError(f"weights.transport={name}: {obstacle}")
        else:
            log.warning("a weight transport is not used", transport=transport.name, reason=obstacle)
    late = dict.fromkeys(TRANSPORTS[transport.late] for transport in offered if transport.late is not None)
    return list(dict.fromkeys([*offered, *late]))


def build_transports(config: RunConfig) -> Transports:
    """The transports that `weights.transport` may need.

    Raises: ConfigError when a port is taken, a key file is missing, or a folder can't be written to.
    """
    weights = config.weights
    direct = None if config.model.lora is not None else config.rollout.engine.direct  # adapters are small
    offered = offered_transports(weights, run=config.run.name, direct=direct)
    folder = config.paths.weights if weights.folder is None else weights.folder / config.run.name
    # Beside a broadcast only late joiners fetch, and they hold no version that a difference applies to.
    full_every = 1 if any(transport.broadcast for transport in offered) else weights.full_every
    settings = SenderSettings(weights, config.security, folder.absolute(), full_every)
    fetched: dict[str, Fetched] = {}
    broadcast: Broadcast | None = None
    order = [transport.name for transport in offered]
    try:
        for transport in offered:
            sender: Any = resolve_name(transport.sender).build(settings)
            if transport.broadcast:
                broadcast = sender
            else:
                fetched[transport.name] = sender
    except ConfigError:
        Transports(order, fetched, broadcast).close()
        raise
    return Transports(order, fetched, broadcast)


class Rendezvous:
    """The store at `weights.store_port`, at which the ranks of each transfer group are gathered."""

    def __init__(self, config: WeightsConfig) -> None:
        """Listens. Raises: ConfigError when the address is taken or no address of this host."""
        self._deadline_s = config.deadline_s
        self._store: TCPStore | None = _listen(config)
        self._aborted = threading.Event()

    def begin(self) -> None:
        """Starts another group: an `abort` from now on ends its `gather`."""
        self._aborted = threading.Event()

    def gather(self, epoch: int, world: int, *, payload: Callable[[], str] = str) -> PrefixStore:
        """Waits for all ranks of transfer group `epoch`, then makes the payload and publishes it to them.

        Raises: TransferError, and what `payload` raises.
        """
        assert self._store is not None, "gather() before close()"
        store = PrefixStore(store_prefix(epoch), self._store)
        gather_ranks(store, world, deadline_s=self._deadline_s, aborted=self._aborted, payload=payload)
        return store

    def abort(self) -> None:
        """Ends a wait in `gather`, also one that starts later for this group."""
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
