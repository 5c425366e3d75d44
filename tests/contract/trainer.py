"""The learner and its transport, in short: fills staging memory with version after version by hand."""

from typing import Any

import msgspec
import torch
import xxhash

from slipstream.buffer.wire.weights.layout import tensor_slices
from slipstream.buffer.wire.weights.protocol import Manifest, Probe, TensorInfo
from slipstream.learner.weights.snapshot import SnapshotTaker
from slipstream.models.tensors import typed_view
from slipstream.rollout_servers.engines.base import Engine
from slipstream.rollout_servers.engines.staging import Staging
from tests.contract.policies import policy_of, scores


def publish(
    model: Any, version: int, staging: Staging, *, dtype: torch.dtype = torch.float32, probe: list[int] | None = None
) -> Manifest:
    """Puts the learner's snapshot of a model into the staging memory, as a rollout server receives it."""
    taker = SnapshotTaker(model, dtype=dtype, bucket_bytes=1 << 20, device=torch.device("cpu"))
    probed = None if probe is None else Probe(token_ids=probe, logprobs=scores(model, probe))
    snapshot = taker.take(version, evaluate=False, keep=True, probe=probed)
    assert snapshot is not None
    manifest = snapshot.sealed().manifest
    staging.begin(manifest).copy_(snapshot.data)
    staging.finish(manifest)
    return manifest


class Trainer:
    """Publishes `policy_of(version)` as version after version."""

    def __init__(self, engine: Engine, *, tied: bool) -> None:
        self._engine = engine
        self._tied = tied
        self.staging = Staging("contract", shared=engine.shares_memory)

    def stage(self, *, leave_out_last: bool = False, probe: list[int] | None = None) -> Manifest:
        """Puts the version after the engine's into the staging memory, on request with one tensor too few."""
        version = self._engine.version + 1
        policy = policy_of(version, tied=self._tied)
        parameters = list(policy.named_parameters())[: -1 if leave_out_last else None]
        tensors = [TensorInfo(name=name, dtype="float32", shape=list(each.shape)) for name, each in parameters]
        manifest = Manifest(version=version, tensors=tensors, bucket_bytes=1 << 20, evaluate=False)
        slices = tensor_slices(self.staging.begin(manifest), tensors)
        sums = []
        for (info, part), (_, parameter) in zip(slices, parameters, strict=True):
            memory = typed_view(part, info.dtype, info.shape)
            memory.copy_(parameter.detach())
            sums.append(xxhash.xxh3_64_intdigest(memory.numpy().tobytes()))
        if probe is not None:
            manifest = msgspec.structs.replace(manifest, probe=Probe(token_ids=probe, logprobs=scores(policy, probe)))
        manifest = msgspec.structs.replace(manifest, checksums=sums)
        self.staging.finish(manifest)
        return manifest

    async def update(self) -> float:
        """Stages and installs the next version; returns the stall."""
        manifest = self.stage()
        return await self._engine.install(manifest.version, manifest, self.staging)
