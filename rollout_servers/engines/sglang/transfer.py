"""Weights over NCCL, straight into the memory of SGLang's workers.

SGLang's scheduler takes part in a broadcast and answers nothing meanwhile; one that does not come would hold it for
torch's 30 minutes. So all members of a group meet first, whoever breaks a broadcast off says so, and a server that is
left alone in one all the same is ended when the deadline has passed, and started again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from slipstream.buffer.wire.weights.layout import tensor_buckets, tensor_pieces
from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.buffer.wire.weights.shm import Segment, SegmentError
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import DirectSource, EngineError, RequestRefused, UpdateFailed
from slipstream.rollout_servers.engines.hf_state_dict import saved_buffers, saved_form
from slipstream.rollout_servers.engines.rendezvous import await_rendezvous
from slipstream.rollout_servers.engines.sglang import protocol as requests
from slipstream.rollout_servers.engines.sglang.arguments import require_one
from slipstream.rollout_servers.engines.sglang.inflight import InFlight
from slipstream.rollout_servers.engines.sglang.server import Calls, ServerProcess
from slipstream.rollout_servers.engines.staging import Staging


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


class Pause:
    """Pauses generation and resumes it; records the version and the requests in flight.

    Attributes:
        version: the policy version that new tokens come from.
        in_flight: requests that the server processes.
        generating: set while generation is not paused.
    """

    def __init__(self, server: ServerProcess, calls: Calls) -> None:
        self._server = server
        self._calls = calls
        self._since = 0.0
        self.version = 0
        self.in_flight: set[InFlight] = set()
        self.generating = asyncio.Event()
        self.generating.set()

    async def begin(self) -> None:
        """Pauses; running requests leave the KV cache and are recomputed afterwards. Raises: EngineError."""
        for request in self.in_flight:
            request.before_update(self.version)
        self._since = time.perf_counter()
        self.generating.clear()
        await self._calls.post(requests.PAUSE, requests.pause_request())

    async def end(self, version: int) -> float:
        """Resumes with `version`; returns the pause in seconds. Raises: EngineError."""
        self.version = version
        await self._calls.post(requests.CONTINUE, {})
        self.generating.set()
        return time.perf_counter() - self._since

    @asynccontextmanager
    async def or_crash(self, manifest: Manifest) -> AsyncIterator[None]:
        """Ends the server when the body fails: it may hold half a version then. Raises: EngineError."""
        try:
            yield
        except EngineError as error:
            raise await self.half(manifest, error) from error
        except asyncio.CancelledError:
            self._calls.fail(f"SGLang may be left with half of version {manifest.version}: cancelled meanwhile")
            self.generating.set()
            raise

    async def half(self, manifest: Manifest, error: EngineError) -> EngineError:
        """Ends a server that may hold half a version. Returns the error to raise."""
        return await self.fail(f"SGLang may be left with half of version {manifest.version}: {error}")

    async def fail(self, reason: str) -> EngineError:
        """Ends a server that would stamp tokens with the version before. Returns the error to raise."""
        error = self._calls.fail(reason)
        self.generating.set()
        await self._server.close()
        return error


_STAGES = ("pp", "pp_size", "pipeline_parallel_size")


def uses_nccl(config: RunConfig, *, gpu: bool) -> bool:
    """Whether versions come this way: only where it was asked for. Raises: ConfigError where there is no GPU."""
    if config.weights.transport != "nccl":
        return False
    if not gpu:
        raise ConfigError("weights.transport=nccl needs a GPU here; set weights.transport=auto")
    require_one(
        config, _STAGES, "SGLang's stages would all take the same ranks of a transfer group; set weights.transport=auto"
    )
    return True


class SglangTransfer:
    """The receiving end of broadcasts to SGLang's own process group (`/init_weights_update_group`).

    Attributes:
        workers: SGLang's tensor-parallel ranks.
    """

    def __init__(self, calls: Calls, pause: Pause, tensors: Tensors, *, workers: int) -> None:
        self._calls = calls
        self._pause = pause
        self._tensors = tensors
        self.workers = workers
        self._group = ""

    async def join(self, group: Form) -> None:
        """Enters a transfer group; generation stands still while the workers connect to the others.

        Raises: UpdateFailed, EngineError.
        """
        await await_rendezvous(group, ranks=self.workers)
        left, self._group = self._group, ""
        try:
            async with asyncio.timeout(group.deadline_s):
                if left:
                    await self._calls.post(requests.LEAVE_GROUP, requests.leave_group_request(left))
                await self._calls.post(requests.JOIN_GROUP, requests.join_group_request(group))
        except RequestRefused as error:
            raise UpdateFailed(str(error)) from error
        except TimeoutError:
            reason = f"SGLang's workers did not connect to the others within {group.deadline_s:g} s"
            raise await self._pause.fail(reason) from None
        except asyncio.CancelledError:  # the learner has given the group up: nothing else ends their wait
            self._calls.fail("a transfer group was given up while SGLang's workers were connecting to each other")
            raise
        self._group = requests.group_name(group)

    async def install(self, manifest: Manifest, source: DirectSource) -> float:
        """Receives a version into the workers' memory while generation is paused; returns the pause in seconds.

        Raises: UpdateFailed, EngineError.
        """
        if not self._group:
            raise UpdateFailed(f"SGLang's workers can't receive version {manifest.version}: they are in no group")
        self._tensors.check(manifest)
        *buckets, last = tensor_buckets(manifest.tensors, manifest.bucket_bytes)
        async with self._pause.or_crash(manifest):
            await self._pause.begin()
            await self._calls.post(requests.BEGIN_UPDATE, {})
            for bucket in buckets:
                await self._calls.post(requests.RECEIVE, requests.bucket_request(bucket, self._group))
            body = requests.bucket_request(last, self._group, version=manifest.version)
            await self._calls.post(requests.RECEIVE, body)
            await source.approval()
            await self._calls.post(requests.END_UPDATE, {})
            return await self._pause.end(manifest.version)
