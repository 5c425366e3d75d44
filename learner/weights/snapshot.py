"""A version's weights, laid out in one byte buffer, ready to be sent while training goes on."""

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

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors under their names, without a copy."""
        slices = tensor_slices(self.data, self.manifest.tensors)
        return [(info.name, typed_view(part, info.dtype, info.shape)) for info, part in slices]

    def sealed(self) -> "Snapshot":
        """The same in host memory, with the checksums by which a receiver knows that it has what was sent."""
        data = self.data
        if data.device.type != "cpu":
            # On a stream of its own: in training's, steps would wait for it.
            with torch.cuda.stream(torch.cuda.Stream(data.device)):
                data = self.data.cpu() if self.host is None else self.host.copy_(self.data)
        sums = Checksums(data.numpy().data, self.manifest.tensors).all()
        return replace(self, manifest=msgspec.structs.replace(self.manifest, checksums=sums), data=data)


class SnapshotTaker:
    """Gathers the sharded weights on every rank and copies them, on rank 0, out of the optimizer's reach.

    Of a model with adapters these alone. Two buffers take turns: one is sent while the other is filled.

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
    ) -> None:
        """With `segments`, the name of the run, the bytes lie in shared memory if there is room for them.

        Raises: torch.OutOfMemoryError when an accelerator has no room for two versions.
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
            self._buffers = [_buffer(segment, size, device) for segment in self._segments or (None, None)]
        except torch.OutOfMemoryError:
            self.close()
            raise

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
        buffer = self._buffers[0]
        snapshot = Snapshot(manifest, buffer.data, buffer.segment, buffer.host)
        for (_, destination), (_, weights) in zip(snapshot.named_tensors(), gathered, strict=True):
            # From a GPU they go as they will lie there: torch would send fp32, and convert in one thread of the host.
            destination.copy_(weights.to(destination.dtype) if weights.is_cuda else weights)
        if buffer.data.is_cuda:
            # The thread that sends has streams of its own, and nothing makes those wait for this one.
            torch.cuda.current_stream(buffer.data.device).synchronize()
        return snapshot

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


def _buffer(segment: Segment | None, size: int, device: torch.device) -> Buffer:
    if segment is None:
        return Buffer(torch.empty(size, dtype=torch.uint8, device=device))
    shared = torch.from_file(str(segment.path), shared=True, size=size, dtype=torch.uint8)
    if device.type == "cpu":
        return Buffer(shared, segment.path)
    return Buffer(torch.empty(size, dtype=torch.uint8, device=device), segment.path, shared)


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
