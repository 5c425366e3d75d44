"""Receivers of the weight transports. Their calls block: the weight follower runs them in a thread."""

import mmap
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

import numpy as np
import torch
import zmq
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from slipstream.buffer.wire.auth import LEARNER, ROLLOUT, client_keys
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.sockets import connect_dealer
from slipstream.buffer.wire.weights.delta import DeltaError
from slipstream.buffer.wire.weights.fabric import GlooFabric, TransferError
from slipstream.buffer.wire.weights.layout import TensorFileError, read_exactly, read_tensors
from slipstream.buffer.wire.weights.protocol import Announce, Form, FromStream, Gone, Part, Piece, Pull, Source
from slipstream.configs.schema.weights import TRANSPORTS, SecurityConfig
from slipstream.models.device_memory import DeviceMemoryError, gpu_id, open_memory
from slipstream.rollout_servers.engines.staging import SourceGone, Staging, describe, join_rendezvous


class Receiver(Protocol):
    """Fills staging memory with a version, within the deadline of the request."""

    def __init__(self, security: SecurityConfig) -> None: ...

    def enter(self, form: Form) -> None:
        """Enters a transfer group, where the transport broadcasts. Raises: TransferError, also where it does not."""
        raise TransferError(f"transport {form.transport} has no transfer groups")

    def receive(self, announce: Announce, staging: Staging) -> None:
        """Receives the version into `staging` and finishes it. Raises: TransferError, SegmentError."""
        ...

    def close(self) -> None:
        """Leaves the group and drops connections; ends calls that block in other threads, where that is possible."""
        ...


class GlooReceiver(Receiver):
    """Receives buckets into host memory, as one rank of a process group to which the learner broadcasts."""

    def __init__(self, security: SecurityConfig) -> None:
        self._form: Form | None = None
        self._fabric = GlooFabric()

    def enter(self, form: Form) -> None:
        """Enters a transfer group; waits in an earlier one fail."""
        self._form = form

        def connect(left: threading.Event) -> ProcessGroupGloo:
            store = join_rendezvous(form, ranks=1, left=left)
            return ProcessGroupGloo(store, form.rank, form.world, timedelta(seconds=form.deadline_s))

        try:
            self._fabric.enter(connect)
        except RuntimeError as error:
            raise TransferError(f"{describe(form)} could not be entered: {error}") from None

    def receive(self, announce: Announce, staging: Staging) -> None:
        """Receives a version bucket by bucket."""
        form, manifest = self._form, announce.manifest
        if form is None or not self._fabric.entered or announce.epoch != form.epoch:
            raise TransferError(
                f"version {manifest.version} is sent through transfer group {announce.epoch}, which was not entered"
            )
        data, end = staging.begin(manifest), 0
        try:
            for end in self._fabric.broadcast(data, manifest.bucket_bytes, announce.deadline_s):
                staging.arrived(end)
        except RuntimeError as error:
            staging.abandon()  # gloo may still write there
            raise TransferError(
                f"version {manifest.version} did not come through {describe(form)}: after {end} of "
                f"{data.numel()} bytes: {error}"
            ) from None
        staging.finish(manifest)

    def close(self) -> None:
        """Leaves the group; `enter` or `receive` in another thread fails."""
        self._fabric.close()


SEGMENTS_KEPT = 2
"""Segments that stay mapped: a learner alternates between two, and mapping one costs as much as copying it."""

Mapped = NDArray[np.uint8]


class ShmReceiver(Receiver):
    """One copy from memory to memory."""

    def __init__(self, security: SecurityConfig) -> None:
        self._mapped: dict[tuple[Path, int], Mapped] = {}

    def receive(self, announce: Announce, staging: Staging) -> None:
        """Copies the version."""
        assert announce.source is not None, "shm is fetched from a source"
        [part] = announce.source.parts
        path = Path(announce.source.place) / part.name
        data = staging.begin(announce.manifest).numpy()
        if part.size_bytes != len(data):
            raise TransferError(
                f"version {part.version} in {path} has {part.size_bytes} bytes, its tensors {len(data)}"
            )
        try:
            segment = self._map(path, part)
        except (OSError, ValueError) as error:
            raise TransferError(
                f"version {part.version} could not be read from the learner's shared memory {path}: {error}"
            ) from None
        staging.copy(segment.data)
        staging.finish(announce.manifest)

    def close(self) -> None:
        """Unmaps the learner's memory."""
        self._mapped = {}  # a new one: a thread may be using the old one

    def _map(self, path: Path, part: Part) -> Mapped:
        """The learner's segment. Raises: OSError, ValueError when it is missing or too short."""
        mapped = self._mapped
        with path.open("rb") as file:
            key = (path, os.fstat(file.fileno()).st_ino)
            segment = mapped.pop(key, None)
            if segment is None or len(segment) != part.size_bytes:
                segment = np.frombuffer(mmap.mmap(file.fileno(), part.size_bytes, prot=mmap.PROT_READ), np.uint8)
        mapped[key] = segment
        while len(mapped) > SEGMENTS_KEPT:
            del mapped[next(iter(mapped))]
        return segment


class IpcReceiver(Receiver):
    """One copy within the memory of a device: of a GPU, or of a host without one."""

    def __init__(self, security: SecurityConfig) -> None:
        self._opened: dict[bytes | str, Tensor] = {}

    def receive(self, announce: Announce, staging: Staging) -> None:
        """Copies the version."""
        assert announce.source is not None, "ipc is fetched from a source"
        [part] = announce.source.parts
        try:
            staging.copy_on_device(self._open(announce.source, part, staging), announce.manifest, part)
        except (OSError, ValueError, DeviceMemoryError, torch.OutOfMemoryError) as error:
            raise TransferError(
                f"version {part.version} could not be copied from the learner's memory in {announce.source.place}: "
                f"{error}"
            ) from None

    def close(self) -> None:
        """Lets go of the learner's memory."""
        self._opened = {}  # a new one: a thread may be using the old one

    def _open(self, source: Source, part: Part, staging: Staging) -> Tensor:
        """The learner's memory. Raises: OSError, ValueError, DeviceMemoryError when it is not here, or too short."""
        here = gpu_id(staging.device)
        there = "" if part.memory is None else part.memory.gpu
        if here != there:
            raise ValueError(f"it lies on {there or 'the host'}, and the engine runs on {here or 'the host'}")
        path = Path(source.place) / part.name
        key = str(path) if part.memory is None else part.memory.handle
        memory = self._opened.pop(key, None)
        if memory is None or memory.numel() != part.size_bytes:
            if part.memory is not None:
                memory = open_memory(part.memory.handle, part.size_bytes, staging.device)
            elif (size := path.stat().st_size) < part.size_bytes:  # torch would make it longer
                raise ValueError(f"it has {size} bytes, not {part.size_bytes}")
            else:
                memory = torch.from_file(str(path), shared=True, size=part.size_bytes, dtype=torch.uint8)
        self._opened[key] = memory
        while len(self._opened) > SEGMENTS_KEPT:
            del self._opened[next(iter(self._opened))]
        return memory


class FileReceiver(Receiver):
    """Reads into memory, without mapping: the learner deletes old files."""

    def receive(self, announce: Announce, staging: Staging) -> None:
        """Reads the parts one after another."""
        assert announce.source is not None, "file is read from a source"
        folder, manifest = Path(announce.source.place), announce.manifest
        held = staging.version
        data = staging.begin(manifest).numpy()
        for part in announce.source.parts:
            path = folder / part.name
            try:
                if part.base is None:
                    read_tensors(path, part.version, manifest.tensors, data.data)
                else:
                    staging.change(_read_part(path, part), manifest, held=held)
            except FileNotFoundError:
                raise SourceGone(f"version {manifest.version}: there is no {path} (any more)") from None
            except (OSError, TensorFileError, DeltaError) as error:
                raise TransferError(f"version {manifest.version} could not be read from {path}: {error}") from None
            held = part.version
        staging.finish(manifest)

    def close(self) -> None:
        """Does nothing: no file stays open."""


def _read_part(path: Path, part: Part) -> memoryview:
    """Raises: OSError, TensorFileError."""
    content = memoryview(bytearray(part.size_bytes))
    with path.open("rb", buffering=0) as file:
        read_exactly(file, content)
    return content


PIECE_BYTES = 4 << 20
"""Most bytes of one message: larger ones are slower."""
WINDOW = 8
"""Pieces in flight at a time."""
ASK_AGAIN_S = 5.0
"""Time without any piece after which those in flight are pulled again, as after a broken connection; doubled each time,
or a slow network would carry them twice."""
CHECK_MS = 100


class StreamReceiver(Receiver):
    """Connects anew for each version: late pieces of one can't be taken for pieces of the next.

    In the process's one context: each has a thread, and glibc leaves what a thread has freed in an arena of its own.
    """

    def __init__(self, security: SecurityConfig) -> None:
        self._keys = client_keys(security, ROLLOUT, service=LEARNER)
        self._closed = threading.Event()

    def receive(self, announce: Announce, staging: Staging) -> None:
        """Pulls the parts one after another."""
        assert announce.source is not None, "stream is fetched from a source"
        held = staging.version
        staging.begin(announce.manifest)
        if announce.source.parts:  # without parts it is held; the learner would log a connection that is closed at once
            self._pull(announce.source, announce, staging, held)
        staging.finish(announce.manifest)

    def _pull(self, source: Source, announce: Announce, staging: Staging, held: int) -> None:
        manifest, deadline = announce.manifest, time.monotonic() + announce.deadline_s
        identity = uuid.uuid4().hex
        try:
            context = zmq.Context[zmq.Socket[bytes]].instance()
            with connect_dealer(
                context, source.place, identity=identity, keys=self._keys, max_message_bytes=2 * PIECE_BYTES
            ) as socket:
                pull = _Pulling(socket, source, deadline, min(PIECE_BYTES, manifest.bucket_bytes), self._closed)
                for part in source.parts:
                    if part.base is None:
                        pull.part(part, staging.data.numpy().data, staging.arrived)
                    else:
                        difference = bytearray(part.size_bytes)
                        pull.part(part, memoryview(difference))
                        staging.change(difference, manifest, held=held)
                    held = part.version
        except DeltaError as error:
            raise TransferError(f"version {manifest.version} from {_name(source)}: {error}") from None

    def close(self) -> None:
        """Ends a transfer in another thread, which fails."""
        self._closed.set()


def _name(source: Source) -> str:
    return f"the stream of the learner at {source.place}"


class _Pulling:
    """Parts over one connection."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", source: Source, deadline: float, piece_bytes: int, closed: threading.Event
    ) -> None:
        self._socket = socket
        self._source = _name(source)
        self._deadline = deadline
        self._piece_bytes = piece_bytes
        self._closed = closed
        self._ask_again_s = ASK_AGAIN_S
        self._came: set[tuple[str, int]] = set()

    def part(self, part: Part, into: memoryview, arrived: Callable[[int], None] = lambda _: None) -> None:
        """Fills `into` with a part; calls `arrived` with the size of its complete prefix. Raises: TransferError."""
        named = f"part {part.name} of {self._source}"
        if part.size_bytes != len(into):
            raise TransferError(f"{named} has {part.size_bytes} bytes, the tensors of its version {len(into)}")
        pieces = {start: into[start : start + self._piece_bytes] for start in range(0, len(into), self._piece_bytes)}
        to_ask = deque(pieces)
        while pieces:
            while to_ask and len(pieces) - len(to_ask) < WINDOW:
                start = to_ask.popleft()
                self._ask(Pull(part=part.name, offset=start, size_bytes=len(pieces[start])), named)
            answer = self._answer(named)
            if answer is None:
                to_ask = deque(pieces)
                continue
            message, content = answer
            if isinstance(message, Gone):
                raise SourceGone(f"{named} no longer exists")
            if (message.part, message.offset) in self._came:
                continue  # it was pulled twice
            awaited = pieces.pop(message.offset, None)
            if message.part != part.name or awaited is None or len(content) != len(awaited):
                raise TransferError(f"{named}: {len(content)} unrequested bytes at {message.offset}")
            awaited[:] = content
            self._came.add((message.part, message.offset))
            arrived(next(iter(pieces), len(into)))

    def _ask(self, pull: Pull, named: str) -> None:
        try:
            self._socket.send(encode(pull), zmq.NOBLOCK)
        except zmq.Again:  # ZeroMQ stops connecting after the service has refused the key
            raise TransferError(f"{named} is refused: are security.keys the same on both sides?") from None

    def _answer(self, named: str) -> tuple[Piece | Gone, memoryview] | None:
        """The next reply; None after a while without one."""
        began = time.monotonic()
        while True:
            arrived = self._socket.poll(CHECK_MS)
            now = time.monotonic()
            if self._closed.is_set():
                raise TransferError(f"{named}: the transfer was cancelled")
            if now >= self._deadline:  # also if pieces trickle in
                raise TransferError(
                    f"{named} did not arrive in time: can the port be reached, and are security.keys the same?"
                )
            if arrived:
                break
            if now >= began + self._ask_again_s:
                self._ask_again_s *= 2
                return None
        head, *rest = self._socket.recv_multipart(copy=False)
        try:
            return decode(head.buffer, FromStream), rest[0].buffer if rest else memoryview(b"")
        except FrameError as error:
            raise TransferError(f"{named}: {error}") from None


def build_receivers(security: SecurityConfig) -> dict[str, Receiver]:
    """All receivers by name; the learner chooses one. Raises: ConfigError when a key file is missing."""
    return {name: build_receiver(name, security) for name, transport in TRANSPORTS.items() if not transport.direct}


def build_receiver(name: str, security: SecurityConfig) -> Receiver:
    """The receiver of a transport that is not direct. Raises: ConfigError when a key file is missing."""
    receiver: Receiver = resolve_name(str(TRANSPORTS[name].receiver))(security)
    return receiver
