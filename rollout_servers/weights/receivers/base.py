"""The receiving end of a weight transport. Everything here blocks: the weight member runs it in a thread."""

from typing import Protocol

from slipstream.buffer.wire.weights.protocol import Announce, Form
from slipstream.rollout_servers.engines.staging import Staging, TransferFailed


class Receiver(Protocol):
    """Fills staging memory with a version, within the deadline that the question names."""

    def enter(self, group: Form) -> None:
        """Enters a transfer group, where the transport broadcasts. Raises: TransferFailed, also where it does not."""
        raise TransferFailed(f"transport {group.transport} has no transfer groups")

    def receive(self, announce: Announce, staging: Staging) -> None:
        """Brings the version into `staging` and finishes it. Raises: TransferFailed, SegmentError."""
        ...

    def close(self) -> None:
        """Leaves the group, drops connections; what blocks in another thread is woken up where that can be done."""
        ...
