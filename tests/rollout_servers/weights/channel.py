"""A weight member that runs, and a learner's end of its channel that is driven by hand."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq.asyncio

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.weights import protocol as w
from slipstream.buffer.wire.weights.layout import Segment
from slipstream.configs import RunConfig
from slipstream.learner.weights.fetch import ShmTransport
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.rollout_servers.engines.base import DirectTransport
from slipstream.rollout_servers.weights.follower import WeightFollower
from tests.conftest import free_port
from tests.rollout_servers.scripted import LastingEngine

DEADLINE_S = 60.0
NEVER_S = 1000.0


@dataclass
class Channel:
    """A member that runs, and the learner's end of its channel."""

    member: WeightFollower
    engine: LastingEngine
    learner: zmq.asyncio.Socket
    running: "asyncio.Task[None]"
    applied: asyncio.Event
    segment: Segment
    transfers: int = 0

    async def join(self) -> w.Join:
        """The next heartbeat."""
        join: w.Join = await self.hears(w.Join)
        return join

    async def told(self, message: m.Message) -> None:
        await self.learner.send_multipart([b"server-1", encode(message)])

    async def asked(self, message: m.Message) -> Any:
        """The answer to a message."""
        await self.told(message)
        return await self.hears(w.Entered, w.Ready, w.Loaded, w.Applied, w.Failed)

    async def hears(self, *kinds: type) -> Any:
        """The next message of one of these kinds."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                peer, frame = await self.learner.recv_multipart()
                assert peer == b"server-1"
                message = decode(frame, w.FromServer)
                if isinstance(message, kinds):
                    return message

    def announcement(self, version: int, *, evaluate: bool = False, probe: w.Probe | None = None) -> w.Announce:
        """A version of four numbers, in shared memory."""
        tensors = [w.TensorInfo(name="weight", dtype="float32", shape=[4])]
        data = torch.from_file(str(self.segment.path), shared=True, size=16, dtype=torch.uint8)
        data.view(torch.float32).fill_(float(version))
        manifest = w.Manifest(version=version, tensors=tensors, bucket_bytes=16, evaluate=evaluate, probe=probe)
        snapshot = Snapshot(manifest, data, self.segment.path).sealed()
        self.transfers += 1
        return w.Announce(
            transfer=self.transfers,
            transport="shm",
            manifest=snapshot.manifest,
            deadline_s=DEADLINE_S,
            source=ShmTransport().source(snapshot, -1),
        )

    async def entered(self) -> None:
        """A transfer group whose versions go straight into the engine."""
        self.engine.direct = DirectTransport("nccl", workers=1)
        form = w.Form(
            transfer=0, epoch=8, transport="nccl", host="127.0.0.1", port=1, rank=1, world=2, deadline_s=DEADLINE_S
        )
        assert isinstance(await self.asked(form), w.Entered)

    def direct(self, version: int, *, deadline_s: float = DEADLINE_S) -> w.Announce:
        """A version that goes straight into the engine."""
        announce = self.announcement(version)
        return msgspec.structs.replace(announce, transport="nccl", source=None, epoch=8, deadline_s=deadline_s)

    async def sent(self, announce: w.Announce) -> w.Apply:
        """Lets a version go straight into the engine; returns what is to be asked next."""
        transfer, version = announce.transfer, announce.manifest.version
        assert await self.asked(announce) == w.Ready(transfer=transfer, version=version)
        sending = w.Sending(transfer=transfer, version=version)
        assert await self.asked(sending) == w.Loaded(transfer=transfer, version=version)
        return w.Apply(transfer=transfer, version=version)

    async def brought(self, version: int, **options: Any) -> w.Apply:
        """Announces a version and waits until it is loaded; returns what is to be asked next."""
        announce = self.announcement(version, **options)
        assert await self.asked(announce) == w.Ready(transfer=announce.transfer, version=version)
        assert await self.hears(w.Loaded, w.Failed) == w.Loaded(transfer=announce.transfer, version=version)
        return w.Apply(transfer=announce.transfer, version=version)


def following(folder: Path) -> RunConfig:
    """The configuration of a run whose learner is on a free port."""
    return RunConfig.model_validate(
        {
            "run": {"name": f"members-{folder.name}"},
            "model": {"path": folder, "dtype": "float32"},
            "weights": {"control_port": free_port(), "deadline_s": 2 * NEVER_S},
        }
    )
