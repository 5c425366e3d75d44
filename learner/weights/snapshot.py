"""A version's weights, laid out in one byte buffer, ready to be sent while training goes on."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from slipstream.buffer.wire.weights.layout import Checksums, Segment, SegmentError, layout, tensor_slices
from slipstream.buffer.wire.weights.protocol import Manifest, Probe, TensorInfo
from slipstream.learner.data.packing import all_actions, pack
from slipstream.learner.models.hf_state_dict import HfStateDict
from slipstream.learner.models.lora import AdapterStateDict, adapter_config, has_adapters
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.models.vision import unsampled_tokens
from slipstream.models.device_memory import DeviceMemoryError, after, beside, export_memory, pin
from slipstream.models.tensors import typed_view


@dataclass(frozen=True)
class Snapshot:
    """One version and its bytes."""

    manifest: Manifest
    data: Tensor
    """uint8, laid out as `buffer.wire.weights.layout` says."""
    segment: Path | None = None
    """The file in shared memory that holds the bytes, from `sealed` on where `data` lies on an accelerator."""
    host: Tensor | None = None
    """Host memory into which `sealed` copies bytes that lie on an accelerator."""
    handle: bytes | None = None
    """The handle by which other processes open `data` on the same GPU."""
    complete: "torch.cuda.Event | None" = None
    """An event of the GPU after which the bytes are there; None: they are."""

    def wait(self) -> None:
        """Returns once all bytes are there."""
        if self.complete is not None:
            self.complete.synchronize()

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors under their names, without a copy."""
        return list(_named(self.data, self.manifest.tensors))

    def sealed(self) -> "Snapshot":
        """The same in host memory, with the checksums by which a receiver knows that it has what was sent."""
        self.wait()
        data = self.data
        if data.device.type != "cpu":
            with beside(data.device):  # in training's stream, steps would wait for it
                data = self.data.cpu() if self.host is None else self.host.copy_(self.data)
        sums = Checksums(data.numpy().data, self.manifest.tensors).all()
        return replace(self, manifest=msgspec.structs.replace(self.manifest, checksums=sums), data=data)


def _named(data: Tensor, tensors: list[TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    for info, part in tensor_slices(data, tensors):
        yield info.name, typed_view(part, info.dtype, info.shape)


class SnapshotTaker:
    """Gathers the sharded weights on every rank and copies them, on rank 0, out of the optimizer's reach.

    Of a model with adapters these alone. Two buffers take turns: one is sent while the other is filled. They lie on the
    host or, for transports that send from there, on the GPU. With `relay`, memory for one version on the GPU is filled
    first and copied to them beside the steps that follow; without it, those wait for the slower copies to the host.

    Attributes:
        no_shared_memory: why the bytes don't lie in shared memory, if they were to.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        device: torch.device,
        segments: str | None = None,
        relay: torch.device | None = None,
        exports: bool = False,
        pinned: bool = False,
    ) -> None:
        """Allocates the buffers.

        Args:
            device: of the buffers.
            segments: the name of the run: the bytes lie in shared memory, if there is room for them.
            relay: of the memory that is filled first.
            exports: other processes open the buffers on a GPU.
            pinned: a GPU copies to buffers on the host: they are pinned.

        Raises: torch.OutOfMemoryError when a GPU has no room for them; DeviceMemoryError when it can't be shared.
        """
        self._bucket_bytes = bucket_bytes
        self._adapter = adapter_config(model) if has_adapters(model) else None
        self._weights: AdapterStateDict | HfStateDict
        self._weights = (HfStateDict if self._adapter is None else AdapterStateDict)(model, dtype=dtype)
        self._tensors = [
            TensorInfo(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
            for name, tensor in self._weights.tensors.items()
            if tensor.is_floating_point()  # a table of whole numbers is no weight: engines keep theirs
        ]
        _, size = layout(self._tensors)
        self._segments: list[Segment] = []
        self.no_shared_memory: str | None = None
        try:
            if segments is not None:
                for _ in range(2):
                    self._segments.append(Segment(segments, size))
        except SegmentError as error:
            self.close()
            self.no_shared_memory = str(error)
        try:
            self._buffers = [
                _buffer(segment, size, device, exports=exports, pinned=pinned)
                for segment in self._segments or (None, None)
            ]
            self._relay = None if relay is None else torch.empty(size, dtype=torch.uint8, device=relay)
        except (torch.OutOfMemoryError, DeviceMemoryError):
            self.close()
            raise
        self._relayed: torch.cuda.Event | None = None

    def take(self, version: int, *, evaluate: bool, keep: bool, probe: Probe | None = None) -> Snapshot | None:
        """The weights as `version`; a collective. Ranks with `keep` false join the gathering and get None."""
        # Gathered first and sent later: a send by one rank between the collectives of all would deadlock.
        gathered = ((name, tensor) for name, tensor in self._weights.gather() if tensor.is_floating_point())
        if not keep:
            for _ in gathered:
                pass
            return None
        self._buffers.reverse()
        manifest = Manifest(
            version=version,
            tensors=self._tensors,
            bucket_bytes=self._bucket_bytes,
            evaluate=evaluate,
            probe=probe,
            adapter=self._adapter,
        )
        buffer, relay = self._buffers[0], self._relay
        if self._relayed is not None:
            self._relayed.wait()  # the GPU waits, not this thread
        complete = self._fill(buffer.data if relay is None else relay, gathered)
        if relay is not None:
            complete = self._relayed = _copy_beside(relay, buffer.data, complete)
        return Snapshot(manifest, buffer.data, buffer.segment, buffer.host, buffer.handle, complete)

    def _fill(self, memory: Tensor, gathered: Iterable[tuple[str, Tensor]]) -> "torch.cuda.Event | None":
        """Starts to copy weights into the memory of a version; returns an event after the copies.

        Threads that send have streams of their own, which must wait for it.
        """
        gpu = memory.device
        for (_, destination), (_, weights) in zip(_named(memory, self._tensors), gathered, strict=True):
            if not weights.is_cuda:
                destination.copy_(weights)
                continue
            gpu = weights.device
            # As they will lie there: torch would send fp32, and convert in one thread of the host.
            destination.copy_(weights.to(destination.dtype), non_blocking=True)
        return after(gpu)

    def close(self) -> None:
        """Removes the files in shared memory; snapshots that were taken keep their bytes."""
        for segment in self._segments:
            segment.close()
        self._segments = []


@dataclass(frozen=True)
class Buffer:
    """The memory of every other snapshot."""

    data: Tensor
    segment: Path | None = None
    host: Tensor | None = None
    handle: bytes | None = None


def _buffer(segment: Segment | None, size: int, device: torch.device, *, exports: bool, pinned: bool) -> Buffer:
    """Raises: torch.OutOfMemoryError, DeviceMemoryError."""
    host, path, handle = None, None, None
    if segment is not None:
        host, path = torch.from_file(str(segment.path), shared=True, size=size, dtype=torch.uint8), segment.path
    elif device.type == "cpu":
        host = torch.empty(size, dtype=torch.uint8)
    if device.type == "cpu" and host is not None:
        if pinned:
            pin(host)
        return Buffer(host, path)
    if exports:
        data, handle = export_memory(size, device)
    else:
        data = torch.empty(size, dtype=torch.uint8, device=device)
    return Buffer(data, path, host, handle)


def _copy_beside(source: Tensor, into: Tensor, complete: "torch.cuda.Event | None") -> "torch.cuda.Event | None":
    """Copies to the host once the source is complete, beside later work; returns the event after the copy."""
    with beside(source.device):
        if complete is not None:
            complete.wait()
        into.copy_(source, non_blocking=True)
        return after(source.device)


class Prober:
    """Scores the same tokens under whatever weights the model has."""

    def __init__(self, model: nn.Module, *, tokens: int, vocabulary: int, device: torch.device) -> None:
        """Draws `tokens` token ids at random, the same on every rank: all that may be sampled are as likely."""
        self._model = model
        self._device = device
        known = np.setdiff1d(np.arange(vocabulary), unsampled_tokens(model))
        self._token_ids = known[np.random.default_rng(0).integers(len(known), size=tokens)]
        (self._batch,) = pack([all_actions(self._token_ids)], token_budget=tokens)

    @torch.no_grad()
    def score(self) -> Probe:
        """The tokens and their log-probs at temperature 1; a collective."""
        # Engines score a text over all tokens.
        scores = score_actions(self._model, self._batch.to(self._device), temperature=1.0, whole_vocabulary=True)
        return Probe(token_ids=self._token_ids.tolist(), logprobs=scores.logprobs_A.tolist())
