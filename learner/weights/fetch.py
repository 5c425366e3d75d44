"""Transports from which every server fetches at its own pace: shared memory, files, a stream over ZeroMQ."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import zmq
from msgspec import structs

from slipstream.buffer.wire.auth import LEARNER, ServiceKeys, service_keys
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.sockets import bind_router
from slipstream.buffer.wire.weights import delta
from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.buffer.wire.weights.layout import SHARED_MEMORY, Segment, SegmentError, tensor_pieces
from slipstream.buffer.wire.weights.protocol import DeviceMemory, Gone, Part, Piece, Pull, Source
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.logging import LogInterval, get_log
from slipstream.configs.runtime.network import tcp_address
from slipstream.configs.schema.weights import SecurityConfig, WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports import Sender, SenderSettings
from slipstream.models.device_memory import DeviceMemoryError, beside, export_memory, gpu_id, sums_by_bucket

log = get_log("learner.weights.fetch")


class ShmTransport(Sender):
    """Members copy from the learner's memory; the checksums reveal that a later version has overwritten it."""

    sent_bytes = 0
    chained = False

    @classmethod
    def build(cls, settings: SenderSettings) -> Self:
        """Needs nothing: the segments belong to the snapshots."""
        return cls()

    @staticmethod
    def obstacle(run: str) -> str | None:
        """The reason why this process can't send so, with a remedy; None if it can."""
        if not SHARED_MEMORY.is_dir():
            return f"there is no {SHARED_MEMORY}"
        try:
            Segment(run, 1).close()
        except SegmentError as error:
            return str(error)
        return None

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

    def release(self, version: int) -> None:
        """Does nothing: the checksums reveal that a version was overwritten."""

    def close(self) -> None:
        """Does nothing: the segments belong to the snapshots."""


class IpcTransport(ShmTransport):
    """Members copy within the memory of the learner's GPU; without one, from its shared memory.

    The sums of the buckets reveal that a later version has overwritten it.
    """

    def __init__(self) -> None:
        self._sums: tuple[int, list[int]] = (-1, [])

    @staticmethod
    def obstacle(run: str) -> str | None:
        """The reason why this process can't send so, with a remedy; None if it can."""
        if not torch.cuda.is_available():
            return ShmTransport.obstacle(run)
        try:
            export_memory(1, torch.device("cuda", torch.cuda.current_device()))
        except (DeviceMemoryError, torch.OutOfMemoryError) as error:
            return f"this GPU's memory can't be shared between processes ({error}); use shm"
        return None

    def prepare(self, snapshot: Snapshot) -> None:
        """Computes the sums of the version's buckets, once its bytes are there."""
        if snapshot.handle is None:
            super().prepare(snapshot)
        manifest, data = snapshot.manifest, snapshot.data
        if manifest.version != self._sums[0]:
            snapshot.wait()
            with beside(data.device):
                self._sums = (manifest.version, sums_by_bucket(data, manifest.bucket_bytes))

    def source(self, snapshot: Snapshot, staged: int) -> Source:
        """The memory, always whole."""
        version, sums = self._sums
        assert version == snapshot.manifest.version, "source() after prepare() of the same version"
        if snapshot.handle is None:
            whole = super().source(snapshot, staged)
            return Source(place=whole.place, parts=[structs.replace(part, sums=sums) for part in whole.parts])
        gpu = gpu_id(snapshot.data.device)
        memory = DeviceMemory(gpu=gpu, handle=snapshot.handle)
        part = Part(name=str(version), version=version, size_bytes=snapshot.data.numel(), sums=sums, memory=memory)
        return Source(place=gpu, parts=[part])


def difference(old: Snapshot, new: Snapshot) -> bytes:
    """The difference from one version to a later one."""
    base, manifest = old.manifest.version, new.manifest
    return delta.encode(old.data.numpy(), new.data.numpy(), manifest.tensors, base=base, version=manifest.version)


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


class FileTransport(Sender):
    """Writes a chain: a whole version, then `full_every - 1` differences, each to the version before it.

    The files of a chain are deleted with the second version after it, so that members can finish reading them.
    """

    sent_bytes = 0

    def __init__(self, folder: Path, *, full_every: int) -> None:
        """Makes the folder and deletes the files of an earlier learner. Raises: ConfigError."""
        self._folder = folder
        self.full_every = full_every
        self.chained = full_every > 1
        self._last: Snapshot | None = None
        self._chain: list[Part] = []
        self._outdated: list[Part] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in (*folder.glob("v*.safetensors"), *folder.glob("v*.delta"), *folder.glob(".v*")):
                path.unlink()
        except OSError as error:
            raise ConfigError(f"weights can't be written to {folder} (weights.folder): {error.strerror}") from None

    @classmethod
    def build(cls, settings: SenderSettings) -> Self:
        """A sender with these settings. Raises: ConfigError as the constructor does."""
        return cls(settings.folder, full_every=settings.full_every)

    def prepare(self, snapshot: Snapshot) -> None:
        """Writes the version, whole or as a difference; whole also if files of the chain are missing."""
        version = snapshot.manifest.version
        self._outdated = [part for part in self._outdated if not self._deleted(part)]
        try:
            self._folder.mkdir(exist_ok=True)
            continues = bool(self._chain) and all((self._folder / part.name).exists() for part in self._chain)
            if continues and self._chain[-1].version == version:
                return
            last = self._last if continues and len(self._chain) < self.full_every else None
            part = self._whole(snapshot) if last is None else self._difference(last, snapshot)
        except OSError as error:
            raise TransferError(
                f"version {version} can't be written to {self._folder} (weights.folder): {error.strerror}"
            ) from None
        if part.base is None:
            self._outdated += [old for old in self._chain if old.name != part.name]
            self._chain = []
        self._chain.append(part)
        self._last = snapshot

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

    def _difference(self, last: Snapshot, snapshot: Snapshot) -> Part:
        """Raises: OSError."""
        version = snapshot.manifest.version
        name = DIFFERENCE.format(version)
        size = write_atomically(self._folder / name, [difference(last, snapshot)])
        return Part(name=name, version=version, size_bytes=size, base=last.manifest.version)

    def source(self, snapshot: Snapshot, staged: int) -> Source:
        """The differences since `staged`, or the whole chain."""
        whole, *steps = self._chain
        assert self._chain[-1].version == snapshot.manifest.version, "source() after prepare() of the same version"
        parts = steps if staged == whole.version else following(steps, staged)
        return Source(place=str(self._folder), parts=self._chain if parts is None else parts)

    def release(self, version: int) -> None:
        """Starts a new chain with the next version if no later one than this was written."""
        if self._last is not None and self._last.manifest.version == version:
            self._last = None

    def close(self) -> None:
        """Keeps the files, which members may still read; the next learner deletes them."""


class StreamTransport(Sender):
    """Serves the last version whole, and the differences between the last `full_every` versions.

    Whole versions are served from the snapshots' memory, the one before the last too, so that fetches of it can finish.
    """

    def __init__(self, config: WeightsConfig, security: SecurityConfig, *, full_every: int) -> None:
        """Listens. Raises: ConfigError when the address is taken, or a key file is missing."""
        self._place = tcp_address(config.host, config.stream_port)
        self.full_every = full_every
        self.chained = full_every > 1
        self._last: Snapshot | None = None
        self._whole: Part | None = None
        self._steps: list[Part] = []
        keys = service_keys(security, LEARNER)
        try:
            self._server = PartServer(tcp_address(config.bind, config.stream_port), keys=keys)
        except ConfigError as error:
            raise ConfigError(f"{error} (weights.bind, weights.stream_port)") from None

    @classmethod
    def build(cls, settings: SenderSettings) -> Self:
        """A sender with these settings. Raises: ConfigError as the constructor does."""
        return cls(settings.weights, settings.security, full_every=settings.full_every)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent so far."""
        return self._server.sent_bytes

    def prepare(self, snapshot: Snapshot) -> None:
        """Encodes the version's difference to the one before, and serves both."""
        if not self._server.alive:
            raise TransferError("the thread that serves the stream has died; the learner's log has the reason")
        version, last = snapshot.manifest.version, self._last
        if last is not None and last.manifest.version == version:
            return
        whole = Part(name=str(version), version=version, size_bytes=snapshot.data.numel())
        parts = {**self._server.parts, whole.name: snapshot.data.numpy().data}
        if last is None:
            self._steps = []
        elif self.chained:
            base, encoded = last.manifest.version, memoryview(difference(last, snapshot))
            step = Part(name=f"{base}-{version}", version=version, size_bytes=len(encoded), base=base)
            parts[step.name] = encoded
            self._steps = [*self._steps, step][-(self.full_every - 1) :]
        while sum(step.size_bytes for step in self._steps[:-1]) >= whole.size_bytes:
            del self._steps[0]  # the whole version is smaller than the chain from here
        served = {part.name for part in (whole, *self._steps)}
        if last is not None:
            served.add(str(last.manifest.version))
        self._last, self._whole = snapshot, whole
        self._server.parts = {name: content for name, content in parts.items() if name in served}

    def source(self, snapshot: Snapshot, staged: int) -> Source:
        """The differences since `staged`, or the whole version where that is less."""
        whole = self._whole
        assert whole is not None, "source() after prepare()"
        assert whole.version == snapshot.manifest.version, "source() after prepare() of the same version"
        steps = [] if staged == whole.version else following(self._steps, staged)
        if steps is None or sum(step.size_bytes for step in steps) >= whole.size_bytes:
            steps = [whole]
        return Source(place=self._place, parts=steps)

    def release(self, version: int) -> None:
        """Serves the version no more; the next one is whole if no later one than this was prepared."""
        if self._last is not None and self._last.manifest.version == version:
            self._last = None
        parts = self._server.parts
        self._server.parts = {name: content for name, content in parts.items() if name != str(version)}

    def close(self) -> None:
        """Stops serving."""
        self._server.close()


MAX_PULL_BYTES = 1 << 16
LOG_EVERY_S = 10.0


class PartServer:
    """Answers pulls in a thread, until it is closed.

    Attributes:
        parts: bytes of each part by name; replaced as a whole, so that the thread needs no lock.
        place: the endpoint that it listens on.
        sent_bytes: bytes that were handed to ZeroMQ so far.
        dropped_frames: number of malformed requests so far.
    """

    def __init__(self, address: str, *, keys: ServiceKeys | None) -> None:
        """Listens. Raises: ConfigError when the address is taken."""
        self.parts: Mapping[str, memoryview] = {}
        self.sent_bytes = 0
        self.dropped_frames = 0
        # A context of its own: ZeroMQ authenticates the clients of one listening socket per context.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = bind_router(self._context, address, max_message_bytes=MAX_PULL_BYTES, keys=keys)
        except BaseException:  # raised again; a context with an open socket would block the interpreter's exit
            self._context.destroy(linger=0)
            raise
        self.place = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._dropped = LogInterval(LOG_EVERY_S)
        self._thread = threading.Thread(target=self._serve, name="weights stream", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread, and with it the socket."""
        self.parts = {}
        if not self._context.closed:
            self._context.term()

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
            self.dropped_frames += 1
            if self._dropped.due():
                log.warning("frame dropped", peer=peer.hex(), dropped=self.dropped_frames, reason=str(error))
            return
        content = self.parts.get(pull.part)
        reply: list[Any] = [peer, encode(Gone(part=pull.part))]
        piece = memoryview(b"")
        if content is not None and 0 <= pull.offset < len(content):
            piece = content[pull.offset : pull.offset + pull.size_bytes]
            reply = [peer, encode(Piece(part=pull.part, offset=pull.offset)), piece]
        try:
            # Without a copy: a client that pulls and never reads must not cost memory.
            self._socket.send_multipart(reply, zmq.NOBLOCK, copy=False)
            self.sent_bytes += len(piece)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.info("piece not sent: the server is gone, or does not read", peer=peer.hex(), part=pull.part)
