"""The learner's side of a weight transfer, driven by hand over the learner's own gloo transport."""

import asyncio
from dataclasses import replace

import msgspec
import torch

from slipstream.buffer.wire.weights import Form, Manifest, layout
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot, SnapshotTaker
from slipstream.learner.weights.transport import GlooTransport
from slipstream.rollout_servers.engines.base import Engine
from tests.conftest import free_port
from tests.contract.policies import policy_of

BUCKET_BYTES = 1 << 20


class Trainer:
    """Publishes `policy_of(version)` as version after version."""

    def __init__(self, engine: Engine, *, tied: bool, deadline_s: float = 60.0) -> None:
        self._engine = engine
        self._tied = tied
        self._config = WeightsConfig(store_port=free_port(), deadline_s=deadline_s, bucket_bytes=BUCKET_BYTES)
        self._transport = GlooTransport(self._config)

    async def join(self, *, world: int = 2) -> None:
        """Forms a transfer group with the engine, and with others where `world` is larger."""
        form = Form(
            epoch=1,
            transport="gloo",
            host=self._config.host,
            port=self._config.store_port,
            rank=1,
            world=world,
            deadline_s=self._config.deadline_s,
        )
        await self._engine.join(form)
        await asyncio.to_thread(self._transport.form, 1, world)

    def snapshot(self) -> Snapshot:
        """The version after the engine's."""
        version = self._engine.version + 1
        policy = policy_of(version, tied=self._tied)
        cpu = torch.device("cpu")
        taker = SnapshotTaker(policy, dtype=torch.float32, bucket_bytes=BUCKET_BYTES, device=cpu)
        snapshot = taker.take(version, evaluate=False, keep=True)
        assert snapshot is not None, "kept"
        return snapshot

    async def send(self) -> Manifest:
        """Transfers the next version without applying it."""
        return await self._send(self.snapshot())

    async def send_without_the_last_tensor(self) -> Manifest:
        """Transfers the next version with one tensor too few."""
        snapshot = self.snapshot()
        tensors = snapshot.manifest.tensors[:-1]
        _, total = layout(tensors)
        manifest = msgspec.structs.replace(snapshot.manifest, tensors=tensors)
        return await self._send(Snapshot(manifest, snapshot.data[:total]))

    async def send_only_the_first_bucket(self) -> Manifest:
        """Announces the next version and breaks off after its first bucket."""
        snapshot = self.snapshot()
        assert snapshot.data.numel() > 2 * BUCKET_BYTES, "there is more than one bucket to send"
        return await self._send(replace(snapshot, data=snapshot.data[:BUCKET_BYTES]))

    async def update(self) -> float:
        """Transfers and applies the next version; returns the stall."""
        return await self._engine.apply(await self.send())

    async def _send(self, snapshot: Snapshot) -> Manifest:
        await self._engine.receive(snapshot.manifest)
        await asyncio.to_thread(self._transport.send, snapshot)
        return snapshot.manifest
