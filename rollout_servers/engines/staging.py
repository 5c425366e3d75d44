"""The rollout server's side of a transfer: its rendezvous with the learner, and memory for the bytes."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from slipstream.buffer.wire.weights import delta
from slipstream.buffer.wire.weights.fabric import TransferError, join_ranks, store_prefix
from slipstream.buffer.wire.weights.layout import Checksums, Segment, layout, tensor_slices
from slipstream.buffer.wire.weights.protocol import Form, Manifest, Part
from slipstream.models.device_memory import beside, pin, sums_by_bucket
from slipstream.models.tensors import typed_view

HOST = torch.device("cpu")


class SourceGone(TransferError):
    """The source no longer exists or has other bytes: a newer version may have replaced it."""


class Staging:
    """Memory for the bytes of one version after the other; memory that was written before is ten times faster.

    Attributes:
        version: the verified version in memory; -1 while there is none.
        device: of the engine; versions that come from there stay there.
    """

    def __init__(self, run: str, *, shared: bool, device: torch.device = HOST) -> None:
        """Nothing is allocated yet.

        Args:
            shared: in a file in shared memory, for engines whose workers are other processes.
            device: of the engine, if it reads the memory itself: a GPU reads pinned memory faster.
        """
        self._run = run
        self._shared = shared
        self.device = device
        self._segment: Segment | None = None
        self._data = torch.empty(0, dtype=torch.uint8)
        self._checksums: Checksums | None = None
        self._base: int | None = None
        self.version = -1

    @property
    def path(self) -> Path:
        """The file with the bytes."""
        assert self._segment is not None, "staging in shared memory, after begin()"
        return self._segment.path

    @property
    def data(self) -> Tensor:
        """The bytes as `layout` orders them, shape [size], uint8."""
        return self._data

    def begin(self, manifest: Manifest) -> Tensor:
        """Memory for a version. It keeps the bytes of the last version, if the size is the same; `version` becomes -1.

        Raises: SegmentError when there is not enough shared memory.
        """
        data = self._allocate(manifest, HOST)
        self._checksums = Checksums(data.numpy().data, manifest.tensors)
        self._base = None
        return data

    def copy_on_device(self, source: Tensor, manifest: Manifest, part: Part) -> None:
        """Copies a version from memory of the engine's device, bucket by bucket, and verifies it by its buckets' sums.

        Raises: SourceGone when they differ; TransferError when `source` has another size; SegmentError or
        torch.OutOfMemoryError when there is no room for a copy.
        """
        with beside(self.device):  # the allocation too: else it could be memory that work in flight still uses
            data = self._allocate(manifest, self.device)
            if len(source) != len(data):
                raise TransferError(f"version {part.version} has {len(source)} bytes, its tensors {len(data)}")
            for into, bucket in zip(*(each.split(manifest.bucket_bytes) for each in (data, source)), strict=True):
                into.copy_(bucket)
            if sums_by_bucket(data, manifest.bucket_bytes) != part.sums:
                raise SourceGone(f"version {manifest.version} arrived damaged: the sum of a bucket differs")
        self.version = manifest.version

    def _allocate(self, manifest: Manifest, device: torch.device) -> Tensor:
        """Raises: SegmentError, torch.OutOfMemoryError."""
        _, size = layout(manifest.tensors)
        if (self._data.numel(), self._data.device) != (size, device):
            self.abandon()
            if self._shared and device == HOST:
                self._segment = Segment(self._run, size)
                self._data = torch.from_file(str(self._segment.path), shared=True, size=size, dtype=torch.uint8)
            else:
                self._data = torch.empty(size, dtype=torch.uint8, device=device)
                if device != self.device:
                    pin(self._data)
        self.version = -1
        return self._data

    def arrived(self, end: int) -> None:
        """Reports that the bytes before `end` are complete: they are verified while the others arrive."""
        assert self._checksums is not None, "between begin() and finish()"
        self._checksums.arrived(end)

    def copy(self, source: memoryview) -> None:
        """Copies the version's bytes from memory with the same order."""
        assert self._checksums is not None, "between begin() and finish()"
        self._checksums.copied(source)

    def change(self, difference: bytearray | memoryview, manifest: Manifest, *, held: int) -> None:
        """Applies a difference to the bytes of version `held`. Raises: DeltaError."""
        delta.apply(difference, self._data.numpy(), manifest.tensors, held=held)
        if self._base is None:
            self._base = held

    def finish(self, manifest: Manifest) -> None:
        """Verifies the bytes as `manifest.version`. Raises: SourceGone naming the tensors with another checksum."""
        assert self._checksums is not None, "after begin()"
        names, sums = [tensor.name for tensor in manifest.tensors], self._checksums.all()
        self._checksums = None
        wrong = [name for name, found, sent in zip(names, sums, manifest.checksums, strict=True) if found != sent]
        if wrong:
            some = ", ".join(wrong[:3]) + (" and others" if wrong[3:] else "")
            doubt = "" if self._base is None else f", or version {self._base} here is another one"
            raise SourceGone(f"version {manifest.version} arrived damaged{doubt}: checksum of {some} differs")
        self.version = manifest.version

    def abandon(self) -> None:
        """Releases the memory: a failed transfer may still write to it."""
        self.version = -1
        self._checksums = None
        self._data = torch.empty(0, dtype=torch.uint8)
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def named_tensors(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        """Views of the tensors, with their names."""
        for info, part in tensor_slices(self._data, manifest.tensors):
            yield info.name, typed_view(part, info.dtype, info.shape)


def join_rendezvous(form: Form, *, ranks: int, left: threading.Event) -> PrefixStore:
    """Announces `ranks` ranks of this server and waits for all others. Returns the epoch's part of the store.

    Raises: TransferError when others are missing at the deadline, the learner gives up, or `left` is set.
    """
    timeout = timedelta(seconds=form.deadline_s)
    try:
        tcp = TCPStore(form.host, form.port, None, False, timeout, wait_for_workers=False)
        store = PrefixStore(store_prefix(form.epoch), tcp)
        join_ranks(store, range(form.rank, form.rank + ranks), deadline_s=form.deadline_s, left=left)
    except (TransferError, RuntimeError) as error:
        raise TransferError(f"{describe(form)} could not be entered: {error}") from None
    return store


def describe(form: Form) -> str:
    """A transfer group's name in messages."""
    return f"transfer group {form.epoch} of the learner at {form.host}:{form.port}"
