"""What changed from one published version to the next, for transports from which members fetch."""

from collections.abc import Sequence

import numpy as np

from slipstream.buffer.wire import delta
from slipstream.buffer.wire.weights import Part
from slipstream.learner.weights.snapshot import Snapshot


class Differences:
    """Keeps copies of the last versions: training soon overwrites the snapshots themselves.

    Attributes:
        version: the last of them; -1 before the first.
    """

    def __init__(self, *, kept: int) -> None:
        """Keeps so many: one to tell what changed, two where the last but one may still be read."""
        self.version = -1
        self._copies = [np.empty(0, np.uint8)] * kept

    @property
    def newest(self) -> delta.Bytes:
        """The last version's bytes; untouched until as many more have come as are kept."""
        return self._copies[0]

    def keep(self, snapshot: Snapshot) -> None:
        """Makes a version the last one."""
        bytes_ = snapshot.data.numpy()
        oldest = self._copies.pop()
        if oldest.size != bytes_.size:
            oldest = np.empty_like(bytes_)
        np.copyto(oldest, bytes_)
        self._copies.insert(0, oldest)
        self.version = snapshot.manifest.version

    def to(self, snapshot: Snapshot) -> bytes:
        """What leads from the last version to this one."""
        manifest = snapshot.manifest
        return delta.encode(
            self.newest, snapshot.data.numpy(), manifest.tensors, base=self.version, version=manifest.version
        )


def following(parts: Sequence[Part], staged: int) -> list[Part] | None:
    """Those of a row of differences that come after version `staged`; None when it doesn't pass through there."""
    for index, part in enumerate(parts):
        if part.base == staged:
            return list(parts[index:])
    if parts and parts[-1].version == staged:
        return []
    return None
