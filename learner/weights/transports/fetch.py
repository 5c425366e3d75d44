"""Transports from which every server fetches at its own pace: shared memory, files, a stream over ZeroMQ."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from slipstream.buffer.wire.auth import LEARNER, service_keys
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.sockets import bind_router
from slipstream.buffer.wire.weights import delta
from slipstream.buffer.wire.weights.layout import tensor_pieces
from slipstream.buffer.wire.weights.protocol import Gone, Part, Piece, Pull, Source
from slipstream.buffer.wire.weights.shm import SHARED_MEMORY
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.network import tcp_address
from slipstream.configs.schema.weights import SecurityConfig, WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import TransferError

log = get_log("learner.weights.fetch")


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
        """Writes the version, whole or as a difference; whole also if others have deleted what it follows."""
        version = snapshot.manifest.version
        self._outdated = [part for part in self._outdated if not self._deleted(part)]
        try:
            self._folder.mkdir(exist_ok=True)
            goes_on = bool(self._chain) and all((self._folder / part.name).exists() for part in self._chain)
            if goes_on and self._chain[-1].version == version:
                return
            goes_on = goes_on and len(self._chain) < self.full_every
            part = self._difference(snapshot) if goes_on else self._whole(snapshot)
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


MAX_PULL_BYTES = 1 << 16


class StreamTransport:
    """Serves the last version whole, and the differences between the last `full_every` versions.

    The version before the last is still served whole too, until the next one is prepared: who began to fetch it may
    finish.
    """

    def __init__(self, config: WeightsConfig, security: SecurityConfig, *, full_every: int) -> None:
        """Listens. Raises: ConfigError when the address is taken, or a key file is missing."""
        self._place = tcp_address(config.host, config.stream_port)
        self.full_every = full_every
        self._last = Differences(kept=2)
        self._whole: list[Part] = []
        self._steps: list[Part] = []
        self._bytes: Mapping[str, memoryview] = {}
        # A context of its own: ZeroMQ has room for the keys of one listening socket in each.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._bind(config, security)
        self._thread = threading.Thread(target=self._serve, name="weights stream", daemon=True)
        self._thread.start()

    def _bind(self, config: WeightsConfig, security: SecurityConfig) -> "zmq.Socket[bytes]":
        address = tcp_address(config.bind, config.stream_port)
        keys = service_keys(security, LEARNER)
        try:
            return bind_router(self._context, address, max_message_bytes=MAX_PULL_BYTES, keys=keys)
        except ConfigError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{error} (weights.bind, weights.stream_port)") from None

    def prepare(self, snapshot: Snapshot) -> None:
        """Copies the version, and works out what changed in it."""
        if not self._thread.is_alive():
            raise TransferError("the thread that serves the stream has died; this learner's log says of what")
        version = snapshot.manifest.version
        if version == self._last.version:
            return
        bytes_: dict[str, memoryview] = {}
        if self._last.version >= 0 and self.full_every > 1:
            difference = self._last.to(snapshot)
            name = f"{self._last.version}-{version}"
            self._steps.append(Part(name=name, version=version, size_bytes=len(difference), base=self._last.version))
            bytes_[name] = memoryview(difference)
        self._withdraw(self._whole[:-1])  # the new one takes its place in memory
        self._last.keep(snapshot)
        self._whole.append(Part(name=str(version), version=version, size_bytes=snapshot.data.numel()))
        bytes_[str(version)] = self._last.newest.data
        self._whole = self._whole[-2:]
        self._steps = self._steps[-(self.full_every - 1) :]
        while sum(step.size_bytes for step in self._steps[:-1]) >= self._whole[-1].size_bytes:
            del self._steps[0]  # whoever needs it is better off with the whole version
        served = {part.name for part in (*self._whole, *self._steps)}
        self._bytes = {name: content for name, content in {**self._bytes, **bytes_}.items() if name in served}

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
        self._bytes = {name: content for name, content in self._bytes.items() if name not in gone}

    def close(self) -> None:
        """Ends the thread, and with it the socket."""
        self._context.term()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                peer, *frames = self._socket.recv_multipart()
                self._answer(peer, frames)
        except zmq.ContextTerminated:
            pass  # close()
        finally:
            self._socket.close(linger=0)

    def _answer(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            pull = decode(b"".join(frames), Pull)
        except FrameError as error:
            log.warning("frame dropped", peer=peer.hex(), reason=str(error))
            return
        content = self._bytes.get(pull.part)
        reply: list[Any] = [peer, encode(Gone(part=pull.part))]
        if content is not None and 0 <= pull.offset < len(content):
            piece = content[pull.offset : pull.offset + pull.size_bytes]
            reply = [peer, encode(Piece(part=pull.part, offset=pull.offset)), piece]
        try:
            # Not copied: who pulls and never reads costs no memory.
            self._socket.send_multipart(reply, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.info("piece not sent: the server is gone, or does not read", peer=peer.hex(), part=pull.part)
