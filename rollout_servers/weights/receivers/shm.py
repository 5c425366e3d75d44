"""Shared memory: a version is copied out of the learner's segment."""

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.buffer.wire.weights.protocol import Announce, Part
from slipstream.rollout_servers.engines.staging import Staging, TransferFailed
from slipstream.rollout_servers.weights.receivers.base import Receiver

KEPT = 2
"""Segments that stay mapped: a learner's two take turns, and mapping one anew costs as much as copying it."""

Segment = NDArray[np.uint8]


class ShmReceiver(Receiver):
    """One copy from memory to memory."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[Path, int], Segment] = {}

    def receive(self, announce: Announce, staging: Staging) -> None:
        """Copies the version."""
        assert announce.source is not None, "shm is fetched from a source"
        [part] = announce.source.parts
        path = Path(announce.source.place) / part.name
        data = staging.begin(announce.manifest).numpy()
        if part.size_bytes != len(data):
            raise TransferFailed(
                f"version {part.version} in {path} has {part.size_bytes} bytes, its tensors {len(data)}"
            )
        try:
            segment = self._map(path, part)
        except (OSError, ValueError) as error:
            raise TransferFailed(
                f"version {part.version} could not be read from the learner's shared memory {path}: {error}"
            ) from None
        staging.copy(segment.data)
        staging.finish(announce.manifest)

    def close(self) -> None:
        """Lets go of the learner's memory; what comes next is mapped anew."""
        self._mapped = {}  # a thread may be at the one before

    def _map(self, path: Path, part: Part) -> Segment:
        """The learner's segment. Raises: OSError, ValueError when it is not there or too short."""
        mapped = self._mapped
        with path.open("rb") as file:
            key = (path, os.fstat(file.fileno()).st_ino)
            segment = mapped.pop(key, None)
            if segment is None or len(segment) != part.size_bytes:
                segment = np.frombuffer(mmap.mmap(file.fileno(), part.size_bytes, prot=mmap.PROT_READ), np.uint8)
        mapped[key] = segment
        while len(mapped) > KEPT:
            del mapped[next(iter(mapped))]
        return segment
