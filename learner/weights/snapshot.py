"""A version's weights, laid out in one byte buffer, ready to be sent while training goes on."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.buffer.wire.weights import Manifest, TensorInfo, layout
from slipstream.learner.model import full_weights


@dataclass(frozen=True)
class Snapshot:
    """One version and its bytes."""

    manifest: Manifest
    data: Tensor
    """uint8, laid out as `buffer.wire.weights.layout` says."""

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors under their names, without a copy."""
        offsets, _ = layout(self.manifest.tensors)
        named = []
        for info, offset in zip(self.manifest.tensors, offsets, strict=True):
            dtype: torch.dtype = getattr(torch, info.dtype)
            size = dtype.itemsize * math.prod(info.shape)
            named.append((info.name, self.data[offset : offset + size].view(dtype).view(info.shape)))
        return named


class SnapshotTaker:
    """Gathers the sharded weights on every rank and copies them, on rank 0, out of the optimizer's reach.

    Two buffers take turns: one is sent while the other is filled.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype, bucket_bytes: int, device: torch.device) -> None:
        self._model = model
        self._bucket_bytes = bucket_bytes
        self._tensors = [
            TensorInfo(name=name, dtype=str(dtype).removeprefix("torch."), shape=list(parameter.shape))
            for name, parameter in model.named_parameters()
        ]
        _, total = layout(self._tensors)
        self._buffers = [torch.empty(total, dtype=torch.uint8, device=device) for _ in range(2)]

    def take(self, version: int, *, evaluate: bool, keep: bool) -> Snapshot | None:
        """The weights as `version`; a collective. Ranks with `keep` false join the gathering and get None."""
        # Gathered first and sent later: a send by one rank between the collectives of all would deadlock.
        gathered: Iterable[tuple[str, Tensor]] = full_weights(self._model)
        if not keep:
            for _ in gathered:
                pass
            return None
        self._buffers.reverse()
        manifest = Manifest(version=version, tensors=self._tensors, bucket_bytes=self._bucket_bytes, evaluate=evaluate)
        snapshot = Snapshot(manifest, self._buffers[0])
        for (_, destination), (_, weights) in zip(snapshot.named_tensors(), gathered, strict=True):
            destination.copy_(weights)
        return snapshot
