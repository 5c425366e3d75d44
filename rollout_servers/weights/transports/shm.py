"""Shared memory: a version is copied out of the learner's segment."""

import mmap
from pathlib import Path

from slipstream.buffer.wire.weights import Announce, Form
from slipstream.rollout_servers.weights.staging import Staging, TransferFailed


class ShmReceiver:
    """Copies, then hashes: measured, hashing each piece while it is in the cache is no faster."""

    def enter(self, group: Form) -> None:
        """There are no groups here."""
        raise TransferFailed(f"transport {group.transport} has no transfer groups")

    def receive(self, announce: Announce, staging: Staging) -> None:
        """One copy from memory to memory."""
        assert announce.source is not None, "shm is fetched from a source"
        [part] = announce.source.parts
        path = Path(announce.source.place) / part.name
        data = staging.begin(announce.manifest)
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), part.size_bytes, prot=mmap.PROT_READ) as segment:
                if part.size_bytes != data.numel():
                    raise TransferFailed(
                        f"version {part.version} in {path} has {part.size_bytes} bytes, its tensors {data.numel()}"
                    )
                data.numpy()[:] = memoryview(segment)
        except (OSError, ValueError) as error:
            raise TransferFailed(
                f"version {part.version} could not be read from the learner's shared memory {path}: {error}"
            ) from None
        staging.finish(announce.manifest)

    def close(self) -> None:
        """Nothing is kept open."""
