"""Transports from which every server fetches at its own pace: shared memory, files, a stream over ZeroMQ."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slipstream.buffer.wire.auth import LEARNER, service_keys
from slipstream.buffer.wire.weights import delta
from slipstream.buffer.wire.weights.layout import tensor_pieces
from slipstream.buffer.wire.weights.protocol import Part, Source
from slipstream.buffer.wire.weights.shm import SHARED_MEMORY
from slipstream.buffer.wire.weights.stream import PartServer
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.network import tcp_address
from slipstream.configs.schema.weights import SecurityConfig, WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import TransferError

log = get_log("learner.weights.fetch")


class ShmTransport:
    """Members copy from the learner's memory; the checksums reveal that a later version has overwritten it."""

    sent_bytes = 0

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
        """Does nothing: the segments belong to the snapshots."""


class Differences:
    """Copies of the last versions: training soon overwrites the snapshots themselves.

    Attributes:
        version: the last of them; -1 before the first.
    """

    def __init__(self, *, kept: int) -> None:
        """Keeps so many copies: one to encode differences, two where the one before may still be read."""
        self.version = -1
        self._copies = [np.empty(0, np.uint8)] * kept

    @property
    def newest(self) -> delta.Bytes:
        """The last version's bytes; overwritten after as many more versions as are kept."""
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
        """The difference from the last version to this one."""
        manifest = snapshot.manifest
        return delta.encode(
            self.newest, snapshot.data.numpy(), manifest.tensors, base=self.version, version=manifest.version
        )


def following(parts: Sequence[Part], staged: int) -> list[Part] | None:
    """The differences of a chain after version `staged`; None when the chain does not contain that version."""
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

    The files of a chain are deleted with the second version after it, so that members can finish reading them.
    """

    sent_bytes = 0

    def __init__(self, folder: Path, *, full_every: int) -> None:
        """Makes the folder and deletes the files of an earlier learner. Raises: ConfigError."""
        self._folder = folder
        self.full_every = full_every
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
        """Writes the version, whole or as a difference; whole also if files of the chain are missing."""
        version = snapshot.manifest.version
        self._outdated = [part for part in self._outdated if not self._deleted(part)]
        try:
            self._folder.mkdir(exist_ok=True)
            continues = bool(self._chain) and all((self._folder / part.name).exists() for part in self._chain)
            if continues and self._chain[-1].version == version:
                return
            continues = continues and len(self._chain) < self.full_every
            part = self._difference(snapshot) if continues else self._whole(snapshot)
        except OSError as error:
            raise TransferError(
                f"version {version} can't be written to {self._folder} (weights.folder): {error.strerror}"
            ) from None
        if part.base is None:
            self._outdated += [old for old in self._chain if old.name != part.name]
            self._chain = []
        self._chain.append(part)
        if self.full_every > 1:
            self._last.keep(snapshot)

    def _deleted(self, part: Part) -> bool:
        try:
            (self._folder / part.name).unlink(missing_ok=True)
        except OSError as error:  # on a network file system the next attempt may succeed
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
        """Keeps the files, which members may still read; the next learner deletes them."""


class StreamTransport:
    """Serves the last version whole, and the differences between the last `full_every` versions.

    The version before the last is served whole too, until the next one is prepared, so that fetches of it can finish.
    """

    def __init__(self, config: WeightsConfig, security: SecurityConfig, *, full_every: int) -> None:
        """Listens. Raises: ConfigError when the address is taken, or a key file is missing."""
        self._place = tcp_address(config.host, config.stream_port)
        self.full_every = full_every
        self._last = Differences(kept=2)
        self._whole: list[Part] = []
        self._steps: list[Part] = []
        keys = service_keys(security, LEARNER)
        try:
            self._server = PartServer(tcp_address(config.bind, config.stream_port), keys=keys)
        except ConfigError as error:
            raise ConfigError(f"{error} (weights.bind, weights.stream_port)") from None

    @property
    def sent_bytes(self) -> int:
        """Bytes sent so far."""
        return self._server.sent_bytes

    def prepare(self, snapshot: Snapshot) -> None:
        """Copies the version and encodes its difference to the one before."""
        if not self._server.alive:
            raise TransferError("the thread that serves the stream has died; the learner's log has the reason")
        version = snapshot.manifest.version
        if version == self._last.version:
            return
        bytes_: dict[str, memoryview] = {}
        if self._last.version >= 0 and self.full_every > 1:
            difference = self._last.to(snapshot)
            name = f"{self._last.version}-{version}"
            self._steps.append(Part(name=name, version=version, size_bytes=len(difference), base=self._last.version))
            bytes_[name] = memoryview(difference)
        self._withdraw(self._whole[:-1])  # its memory is overwritten by the new one
        self._last.keep(snapshot)
        self._whole.append(Part(name=str(version), version=version, size_bytes=snapshot.data.numel()))
        bytes_[str(version)] = self._last.newest.data
        self._whole = self._whole[-2:]
        self._steps = self._steps[-(self.full_every - 1) :]
        while sum(step.size_bytes for step in self._steps[:-1]) >= self._whole[-1].size_bytes:
            del self._steps[0]  # the whole version is smaller than the chain from here
        served = {part.name for part in (*self._whole, *self._steps)}
        self._server.parts = {
            name: content for name, content in {**self._server.parts, **bytes_}.items() if name in served
        }

    def source(self, snapshot: Snapshot, staged: int) -> Source:
        """The differences since `staged`, or the whole version where that is less."""
        whole = self._whole[-1]
        assert whole.version == snapshot.manifest.version, "source() after prepare() of the same version"
        steps = [] if staged == whole.version else following(self._steps, staged)
        if steps is None or sum(step.size_bytes for step in steps) >= whole.size_bytes:
            steps = [whole]
        return Source(place=self._place, parts=steps)

    def _withdraw(self, parts: Sequence[Part]) -> None:
        gone = {part.name for part in parts}
        self._server.parts = {name: content for name, content in self._server.parts.items() if name not in gone}

    def close(self) -> None:
        """Stops serving."""
        self._server.close()
