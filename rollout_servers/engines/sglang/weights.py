"""A staged version as SGLang reads it: a folder with a safetensors file, which lies in shared memory."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from slipstream.buffer.wire.segments import Segment, SegmentError
from slipstream.buffer.wire.tensor_file import tensor_pieces
from slipstream.buffer.wire.weights import Manifest
from slipstream.rollout_servers.engines.base import UpdateFailed
from slipstream.rollout_servers.weights.saved import saved_buffers, saved_form
from slipstream.rollout_servers.weights.staging import Staging


@dataclass(frozen=True)
class Tensors:
    """The shapes of all tensors of a version, by name: SGLang keeps the old weights of those that don't come."""

    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        """Those of the model that transformers makes of a configuration, which is the one that is trained."""
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        published = saved_form(model, dict(model.named_parameters()) | saved_buffers(model))
        return cls({name: tuple(tensor.shape) for name, tensor in published.items()})

    def check(self, manifest: Manifest) -> None:
        """Raises: UpdateFailed when a version is not one of this model."""
        come = {tensor.name: tuple(tensor.shape) for tensor in manifest.tensors}
        for problem, names in {
            "no weights came for": self.shapes.keys() - come.keys(),
            "the model has no": come.keys() - self.shapes.keys(),
            "of the wrong shape came": {name for name, shape in come.items() if self.shapes.get(name, shape) != shape},
        }.items():
            if names:
                raise UpdateFailed(f"version {manifest.version}: {problem} {', '.join(sorted(names))}")


@asynccontextmanager
async def weights_folder(run: str, manifest: Manifest, staging: Staging) -> AsyncIterator[Path]:
    """A folder that holds a version until the context ends. Raises: UpdateFailed when there is no room for it."""
    writing = asyncio.create_task(asyncio.to_thread(_write, run, manifest, staging))
    try:
        segment = await asyncio.shield(writing)
    except SegmentError as error:
        raise UpdateFailed(f"version {manifest.version} can't be handed to SGLang: {error}") from error
    except asyncio.CancelledError:
        writing.add_done_callback(_close_written)
        raise
    try:
        with TemporaryDirectory(prefix="slipstream-sglang-") as folder:
            # What a dead process leaves here is a link; its shared memory is swept.
            (Path(folder) / "model.safetensors").symlink_to(segment.path)
            yield Path(folder)
    finally:
        segment.close()


def _write(run: str, manifest: Manifest, staging: Staging) -> Segment:
    pieces = iter(tensor_pieces(manifest.version, manifest.tensors, staging.data.numpy().data))
    header = next(pieces)
    segment = Segment(run, len(header) + sum(tensor.size_bytes for tensor in manifest.tensors))
    with segment.path.open("r+b") as file:
        file.write(header)
        file.writelines(pieces)
    return segment


def _close_written(writing: asyncio.Task[Segment]) -> None:
    if not writing.cancelled() and writing.exception() is None:
        writing.result().close()
