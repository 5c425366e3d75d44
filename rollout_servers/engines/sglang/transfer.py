"""Updates of SGLang: from a folder in shared memory, or broadcast by NCCL to its workers.

SGLang's scheduler takes part in a broadcast and answers nothing meanwhile; a missing member would block it for torch's
30 minutes. So all members of a group meet first, and a server that is left alone in a broadcast is ended after the
deadline, and restarted.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from slipstream.buffer.wire.weights.layout import Segment, SegmentError, tensor_buckets, tensor_pieces
from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.configs.runtime.errors import ConfigError
from slipstream.models.architecture import router_sizes
from slipstream.models.state_dict import published_buffers, saved_parts
from slipstream.rollout_servers.engines.base import (
    Completion,
    DirectSource,
    EngineError,
    EngineSettings,
    ExpertReader,
    RequestRefused,
    UpdateFailed,
    await_rendezvous,
)
from slipstream.rollout_servers.engines.sglang import protocol as requests
from slipstream.rollout_servers.engines.sglang.arguments import require_one
from slipstream.rollout_servers.engines.sglang.protocol import whole
from slipstream.rollout_servers.engines.sglang.server import Calls, ServerProcess
from slipstream.rollout_servers.engines.staging import Staging


@dataclass(eq=False)
class InFlight:
    """A request that the server processes.

    Attributes:
        version: the engine's version when the request was sent.
        so_far: its answers as received; tokens of an unfinished answer count as that version's.
        certain: number of tokens of each answer before the next update began; None until then.
        superseded: set when another adapter takes its place: it is to be aborted, and continued with that one.
        ended: set when the server processes it no more.
    """

    version: int
    so_far: Callable[[], list[Completion]]
    certain: list[int] | None = None
    superseded: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def before_update(self, version: int) -> None:
        """Records the tokens that are certainly from `version`: later ones may be from the next."""
        if self.certain is None and self.version == version:
            self.certain = [len(answer.token_ids) for answer in self.so_far()]

    def left(self, version: int) -> list[Completion] | None:
        """Answers that survive a crash of the server at `version`; None if the version of no token is known."""
        if version == self.version:
            return self.so_far()
        if self.certain is None:  # it was sent during an update
            return None
        return [
            self._first(answer, tokens) if answer.finish_reason == "abort" else answer
            for answer, tokens in zip(self.so_far(), self.certain, strict=True)
        ]

    def _first(self, answer: Completion, tokens: int) -> Completion:
        return Completion(
            token_ids=answer.token_ids[:tokens],
            logprobs=answer.logprobs[:tokens],
            spans=whole(self.version, tokens),
            finish_reason=answer.finish_reason,
        )


@dataclass(frozen=True)
class Tensors:
    """Shapes of all tensors of a version, by name: SGLang keeps the old weights of those that are missing."""

    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        """Tensors of the model that transformers builds from a configuration, as the learner does."""
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        published = saved_parts(model, dict(model.named_parameters()) | published_buffers(model))
        return cls({name: tuple(tensor.shape) for name, tensor in published.items()})

    def check(self, manifest: Manifest) -> None:
        """Raises: UpdateFailed when a version does not fit the model."""
        come = {tensor.name: tuple(tensor.shape) for tensor in manifest.tensors}
        for problem, names in {
            "no weights came for": self.shapes.keys() - come.keys(),
            "the model has no": come.keys() - self.shapes.keys(),
            "of the wrong shape came": {name for name, shape in come.items() if self.shapes.get(name, shape) != shape},
        }.items():
            if names:
                raise UpdateFailed(f"version {manifest.version}: {problem} {', '.join(sorted(names))}")


def expert_reader(config: PretrainedConfig) -> ExpertReader:
    """Reads the experts of SGLang's answers. Raises: ConfigError when the model has none."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    layers = model.get_decoder().layers
    sizes = {
        number: found
        for number, layer in enumerate(layers)
        for module in layer.modules()
        if (found := router_sizes(module)) is not None
    }
    experts, per_token = next(iter(sizes.values()), (0, 0))
    return ExpertReader.of(list(sizes), per_token, experts)


@asynccontextmanager
async def weights_folder(run: str, manifest: Manifest, staging: Staging) -> AsyncIterator[Path]:
    """A folder with a version, until the context ends. Raises: UpdateFailed when there is no room for it."""
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
            # A crashed process leaves only the link: its shared memory is swept.
            name = "model.safetensors" if manifest.adapter is None else "adapter_model.safetensors"
            (Path(folder) / name).symlink_to(segment.path)
            if manifest.adapter is not None:
                (Path(folder) / "adapter_config.json").write_text(json.dumps(manifest.adapter), encoding="utf-8")
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

    async def switch(self, version: int) -> float:
        """Makes the adapter of `version`, which is loaded, that of all requests.

        SGLang keeps a request's adapter to its end: those in flight are aborted, and continued by their owners.

        Returns: seconds until the last one has ended.
        """
        since, self.version = time.perf_counter(), version
        earlier = [request for request in self.in_flight if request.version != version]
        for request in earlier:
            request.superseded.set()
        for request in earlier:
            await request.ended.wait()
        return time.perf_counter() - since

    @asynccontextmanager
    async def or_crash(self, manifest: Manifest) -> AsyncIterator[None]:
        """Ends the server when the body fails or is cancelled: it may hold half a version. Raises: EngineError."""
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
        """Ends a server that would give new tokens the wrong version. Returns the error to raise."""
        error = self._calls.fail(reason)
        self.generating.set()
        await self._server.close()
        return error


_STAGES = ("pp", "pp_size", "pipeline_parallel_size")


def uses_nccl(settings: EngineSettings, *, gpu: bool) -> bool:
    """True if weights are broadcast: only where that is configured. Raises: ConfigError where it can't work."""
    if not settings.config.weights.direct:
        return False
    if not gpu:
        transport = settings.config.weights.transport
        raise ConfigError(f"weights.transport={transport} needs a GPU here; set weights.transport=auto")
    require_one(
        settings,
        _STAGES,
        "SGLang's stages would all take the same ranks of a group; set weights.transport=auto",
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
        """Enters a transfer group with all workers. Raises: UpdateFailed, EngineError."""
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
        """Receives a version into the workers' memory while generation is paused; as `Engine.install`."""
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
