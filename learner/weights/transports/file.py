"""Files in a folder that all hosts see: a whole version now and then, and between them what changed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slipstream.buffer.wire.weights import delta
from slipstream.buffer.wire.weights.layout import tensor_pieces
from slipstream.buffer.wire.weights.protocol import Part, Source
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import TransferError

log = get_log("learner.weights.file")


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


WHOLE = "v{:08d}.safetensors"
DIFFERENCE = "v{:08d}.delta"


class FileTransport:
    """Writes a chain: a whole version, then `full_every - 1` differences, each to the version before it.

    The files of a chain go once the next but one version is there: who reads them may finish.
    """

    def __init__(self, folder: Path, *, full_every: int) -> None:
        """Makes the folder, and empties it of what an earlier learner left. Raises: ConfigError."""
        self._folder = folder
        self._full_every = full_every
        self._last = Differences(kept=1)
        self._chain: list[Part] = []
        self._outdated: list[Part] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in (*folder.glob("v*.safetensors"), *folder.glob("v*.delta"), *folder.glob(".v*")):
                path.unlink()
        except OSError as error:
            raise ConfigError(f"weights can't be written to {folder} (weights.folder): {error.strerror}") from None

    def prepare(self, snapshot: Snapshot) -> None:
        """Writes the version, whole or as a difference; whole also if others have deleted what it follows."""
        version = snapshot.manifest.version
        self._outdated = [part for part in self._outdated if not self._deleted(part)]
        try:
            self._folder.mkdir(exist_ok=True)
            goes_on = bool(self._chain) and all((self._folder / part.name).exists() for part in self._chain)
            if goes_on and self._chain[-1].version == version:
                return
            goes_on = goes_on and len(self._chain) < self._full_every
            part = self._difference(snapshot) if goes_on else self._whole(snapshot)
        except OSError as error:
            raise TransferError(
                f"version {version} can't be written to {self._folder} (weights.folder): {error.strerror}"
            ) from None
        if part.base is None:
            self._outdated += [old for old in self._chain if old.name != part.name]
            self._chain = []
        self._chain.append(part)
        if self._full_every > 1:
            self._last.keep(snapshot)

    def _deleted(self, part: Part) -> bool:
        try:
            (self._folder / part.name).unlink(missing_ok=True)
        except OSError as error:  # on a network file system it may well succeed the next time
            log.warning("old weights not deleted", file=str(self._folder / part.name), reason=error.strerror)
            return False
        return True

    def _whole(self, snapshot: Snapshot) -> Part:
        """Raises: OSError."""
        manifest = snapshot.manifest
        name = WHOLE.format(manifest.version)
        pieces = tensor_pieces(manifest.version, manifest.tensors, snapshot.data.numpy().data)
        size = write_atomically(self._folder / name, pieces)
        return Part(name=name, version=manifest.version, size_bytes=size)

    def _difference(self, snapshot: Snapshot) -> Part:
        """Raises: OSError."""
        version = snapshot.manifest.version
        name = DIFFERENCE.format(version)
        size = write_atomically(self._folder / name, [self._last.to(snapshot)])
        return Part(name=name, version=version, size_bytes=size, base=self._last.version)

    def source(self, snapshot: Snapshot, staged: int) -> Source:
        """The differences since `staged`, or the whole chain."""
        whole, *steps = self._chain
        assert self._chain[-1].version == snapshot.manifest.version, "source() after prepare() of the same version"
        parts = steps if staged == whole.version else following(steps, staged)
        return Source(place=str(self._folder), parts=self._chain if parts is None else parts)

    def close(self) -> None:
        """The files stay, for those who still read them; the next learner deletes them."""
