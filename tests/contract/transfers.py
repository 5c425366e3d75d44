"""What the contract of weight transports is tried with: versions, a sender, receivers, and one way to move versions."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from slipstream.buffer.wire.weights.layout import Segment, layout
from slipstream.buffer.wire.weights.protocol import Announce, Form, Manifest, Source, TensorInfo
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports import Broadcast, Fetched, Transports
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.weights.receivers import Receiver, build_receivers

BUCKET_BYTES = 1 << 16
DEADLINE_S = 30.0
TENSORS = [
    TensorInfo(name="embedding", dtype="bfloat16", shape=[33_001, 7]),
    TensorInfo(name="scalar", dtype="float16", shape=[1]),
    TensorInfo(name="nothing", dtype="float32", shape=[0, 4]),
    TensorInfo(name="layer", dtype="float32", shape=[70_001]),
    TensorInfo(name="norm", dtype="bfloat16", shape=[3, 5]),
]


class Versions:
    """Makes one version after another, in two segments that take turns, as a learner does."""

    def __init__(self, run: str) -> None:
        _, size = layout(TENSORS)
        self._segments = [Segment(run, size) for _ in range(2)]
        self._data = [
            torch.from_file(str(segment.path), shared=True, size=size, dtype=torch.uint8) for segment in self._segments
        ]
        self._random = np.random.default_rng(0)
        self._bytes = self._random.integers(0, 256, size, dtype=np.uint8)
        self._version = 0

    def next(self, *, few: bool = False) -> Snapshot:
        """Differs from the last version in a few bytes of the embedding and, unless `few`, in all of the layer."""
        self._version += 1
        self._segments.reverse()
        self._data.reverse()
        layer = layout(TENSORS)[0][3]
        if not few:
            self._bytes[layer : layer + TENSORS[3].size_bytes] += 1
        self._bytes[self._random.integers(0, TENSORS[0].size_bytes, 50)] += 1
        self._data[0].numpy()[:] = self._bytes
        manifest = Manifest(version=self._version, tensors=TENSORS, bucket_bytes=BUCKET_BYTES, evaluate=False)
        return Snapshot(manifest, self._data[0], self._segments[0].path).sealed()

    def close(self) -> None:
        """Frees the segments."""
        for segment in self._segments:
            segment.close()


@dataclass
class Server:
    """One rollout server: a receiver, and the memory that it fills."""

    receiver: Receiver
    staging: Staging
    error: SlipstreamError | None = None

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether every byte of the version is here, under its number."""
        found = dict(self.staging.named_tensors(snapshot.manifest))
        return self.staging.version == snapshot.manifest.version and all(
            found[name].dtype == sent.dtype
            and found[name].shape == sent.shape
            and torch.equal(found[name].flatten().view(torch.uint8), sent.flatten().view(torch.uint8))
            for name, sent in snapshot.named_tensors()
        )


@dataclass
class Channel:
    """A transport's sending end and all that is needed to try it."""

    name: str
    config: RunConfig
    transports: Transports
    versions: Versions
    servers: list[Server] = field(default_factory=list)
    epoch: int = 0

    @property
    def broadcasts(self) -> bool:
        """Whether it sends to all at once."""
        return self.transports.broadcast is not None

    @property
    def broadcast(self) -> Broadcast:
        """The sending end, where it broadcasts."""
        assert self.transports.broadcast is not None, f"{self.name} is fetched from"
        return self.transports.broadcast

    @property
    def fetched(self) -> Fetched:
        """The sending end, where it is fetched from."""
        return self.transports.fetched[self.name]

    def server(self, config: RunConfig | None = None) -> Server:
        """One more rollout server."""
        built = build_receivers((config or self.config).security)
        receiver = built.pop(self.name)
        for other in built.values():
            other.close()
        self.servers.append(Server(receiver, Staging(self.config.run.name, shared=False)))
        return self.servers[-1]

    def source(self, snapshot: Snapshot, staged: int) -> Source:
        """From where it is fetched."""
        return self.fetched.source(snapshot, staged)

    def send(self, snapshot: Snapshot, servers: Sequence[Server], *, deadline_s: float = DEADLINE_S) -> None:
        """Brings a version to the servers; what one of them failed with is in its `error`."""
        if self.broadcasts:
            self._broadcast(snapshot, servers, deadline_s)
            return
        self.fetched.prepare(snapshot)
        for server in servers:
            receive(server, self.announce(snapshot.manifest, self.source(snapshot, server.staging.version), deadline_s))

    def announce(self, manifest: Manifest, source: Source | None = None, deadline_s: float = DEADLINE_S) -> Announce:
        """What a server is told."""
        epoch = self.epoch if self.broadcasts else None
        return Announce(
            transfer=1, transport=self.name, manifest=manifest, deadline_s=deadline_s, epoch=epoch, source=source
        )

    def form(self, rank: int, world: int, *, deadline_s: float = DEADLINE_S) -> Form:
        """What a server is told before that, where versions are broadcast."""
        return Form(
            transfer=1,
            epoch=self.epoch,
            transport=self.name,
            host=self.config.weights.host,
            port=self.config.weights.store_port,
            rank=rank,
            world=world,
            deadline_s=deadline_s,
        )

    def enter(self, servers: Sequence[Server]) -> None:
        """Makes a group of the learner and the servers."""
        self.epoch += 1
        world = len(servers) + 1
        entering = [
            in_thread(server.receiver.enter, self.form(rank, world)) for rank, server in enumerate(servers, start=1)
        ]
        self.broadcast.form(self.epoch, world)
        for thread in entering:
            thread.join()

    def _broadcast(self, snapshot: Snapshot, servers: Sequence[Server], deadline_s: float) -> None:
        self.enter(servers)
        announce = self.announce(snapshot.manifest, deadline_s=deadline_s)
        receiving = [in_thread(receive, server, announce) for server in servers]
        self.broadcast.send(snapshot)
        for thread in receiving:
            thread.join()


def receive(server: Server, announce: Announce) -> None:
    """Lets a server receive, and notes what it fails with."""
    server.error = None
    try:
        server.receiver.receive(announce, server.staging)
    except SlipstreamError as error:
        server.error = error


def in_thread(function: Any, *arguments: Any) -> threading.Thread:
    """Calls a function in a thread, which was started."""
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    return thread


def damaged(snapshot: Snapshot) -> Snapshot:
    """The same with a flipped bit, which its checksums do not know of."""
    snapshot.data[layout(TENSORS)[0][3]] ^= 1
    return snapshot


def mislabelled(old: Snapshot, new: Snapshot) -> Snapshot:
    """The bytes of an old version, said to be those of a new one."""
    return replace(old, manifest=new.manifest, data=old.data.clone())
