"""Shared memory: servers of the learner's host copy a version out of the segment that its snapshot lies in."""

from slipstream.buffer.wire.weights.protocol import Part, Source
from slipstream.buffer.wire.weights.shm import SHARED_MEMORY
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import TransferError


class ShmTransport:
    """Nothing is copied by the learner. Who reads so late that the next but one lies there is told by the checksums."""

    def prepare(self, snapshot: Snapshot) -> None:
        """Makes sure that the version lies in shared memory."""
        if snapshot.segment is None:
            raise TransferError(
                f"version {snapshot.manifest.version} does not lie in shared memory: enlarge {SHARED_MEMORY} "
                "(Docker: shm_size), or choose another weights.transport"
            )

    def source(self, snapshot: Snapshot, staged: int) -> Source:
        """The segment; always whole, as a copy in memory is faster than a difference."""
        del staged
        assert snapshot.segment is not None, "source() after prepare()"
        part = Part(name=snapshot.segment.name, version=snapshot.manifest.version, size_bytes=snapshot.data.numel())
        return Source(place=str(snapshot.segment.parent), parts=[part])

    def close(self) -> None:
        """Nothing: the segments are the snapshots'."""
