"""The sending end of a weight transport. Everything here blocks: the publisher runs it in a thread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.buffer.wire.weights.protocol import Source
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.learner.weights.snapshot import Snapshot


class TransferError(SlipstreamError):
    """A transfer broke off or did not begin.

    Attributes:
        absent: the ranks that never entered the transfer group, where that is known.
    """

    def __init__(self, message: str, absent: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.absent = absent


class WeightTransport(Protocol):
    """The data plane: either members fetch a version from a source, or they form a group and it is broadcast."""

    def close(self) -> None:
        """Frees ports, files and memory."""
        ...


class Fetched(WeightTransport, Protocol):
    """A transport from which every member fetches at its own pace: nobody waits for anybody."""

    def prepare(self, snapshot: Snapshot) -> None:
        """Makes a version ready to be fetched, once for all members. Raises: TransferError."""
        ...

    def source(self, snapshot: Snapshot, staged: int) -> Source:
        """From where a member that keeps the bytes of version `staged` (-1: none) fetches the prepared version."""
        ...


class Broadcast(WeightTransport, Protocol):
    """A transport that sends to all members of a group at once. Calls block, with the configured deadline."""

    name: str
    on_device: bool
    """Whether snapshots must lie in the accelerator's memory."""

    def form(self, epoch: int, world: int) -> None:
        """Enters transfer group `epoch` as rank 0 of `world`; returns when all are in. Raises: TransferError."""
        ...

    def send(self, snapshot: Snapshot) -> None:
        """Sends a version to all members of the group. Raises: TransferError."""
        ...

    def abort(self) -> None:
        """Breaks off what blocks in another thread, as well as the transport can."""
        ...


@dataclass(frozen=True)
class Transports:
    """What a learner sends through."""

    order: Sequence[str]
    """The names of all, the preferred one first."""
    fetched: Mapping[str, Fetched]
    """By name."""
    broadcast: Broadcast | None

    def close(self) -> None:
        """Frees ports, files and memory of all."""
        for transport in self.fetched.values():
            transport.close()
        if self.broadcast is not None:
            self.broadcast.close()
