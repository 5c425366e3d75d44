"""What changed from one published version to the next, for transports from which members fetch."""

from collections.abc import Sequence

import numpy as np

from slipstream.buffer.wire import delta
from slipstream.buffer.wire.weights import Part
from slipstream.learner.weights.snapshot import Snapshot


class Differences:
    """Keeps copies of the last two versions: training soon overwrites the snapshots themselves.

    Attributes:
        version: the last of them; -1 before the first.
    """

    def __init__(self) -> None:
        self.version = -1
        self._newest = np.empty(0, np.uint8)
        self._older = np.empty(0, np.uint8)

    @property
    def newest(self) -> delta.Bytes:
        """The last version's bytes; untouched until the next but one comes."""
        return self._newest

    def keep(self, snapshot: Snapshot) -> None:
        """Makes a version the last one."""
        bytes_ = snapshot.data.numpy()
        if self._older.size != bytes_.size:
            self._older = np.empty_like(bytes_)
        np.copyto(self._older, bytes_)
        self._newest, self._older = self._older, self._newest
        self.version = snapshot.manifest.version

    def to(self, snapshot: Snapshot) -> bytes:
        """What leads from the last version to this one."""
        manifest = snapshot.manifest
        return delta.encode(
            self._newest, snapshot.data.numpy(), manifest.tensors, base=self.version, version=manifest.version
        )


def following(parts: Sequence[Part], staged: int) -> list[Part] | None:
    """Those of a row of differences that come after version `staged`; None when it doesn't pass through there."""
    for index, part in enumerate(parts):
        if part.base == staged:
            return list(parts[index:])
    if parts and parts[-1].version == staged:
        return []
    return None
