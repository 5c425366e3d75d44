"""SGLang behind its own HTTP server, through its native API."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Self

import torch
from transformers import AutoConfig

from slipstream.buffer.wire.weights.protocol import Manifest
from slipstream.configs.models import without_remote_code
from slipstream.rollout_servers.engines.base import (
    BaseEngine,
    Completion,
    DirectTransport,
    EngineError,
    EngineSettings,
    Pressure,
    PromptLimits,
    Request,
    check_positions,
)
from slipstream.rollout_servers.engines.sglang import protocol as requests
from slipstream.rollout_servers.engines.sglang.arguments import INFO, check_settings, interpreter, start_command
from slipstream.rollout_servers.engines.sglang.protocol import (
    Draft,
    ServerInfo,
    cache_usage,
    prompt_logprobs,
    server_info,
)
from slipstream.rollout_servers.engines.sglang.server import Calls, ServerProcess
from slipstream.rollout_servers.engines.sglang.transfer import (
    InFlight,
    Pause,
    SglangTransfer,
    Tensors,
    uses_nccl,
    weights_folder,
)
from slipstream.rollout_servers.engines.staging import Staging

_ABORT_S = 5.0
"""Time limit of an abort."""


class SglangEngine(BaseEngine):
    """SGLang behind its own HTTP server; weights have no checksums, because it fuses tensors.

    Attributes:
        server: the server's process.
    """

    name = "sglang"

    def __init__(self, server: ServerProcess, settings: EngineSettings, limits: PromptLimits, tensors: Tensors) -> None:
        super().__init__(settings.generation)
        self.server = server
        self._client = server.client
        self._calls = Calls(server, update_deadline_s=settings.weights.deadline_s)
        self._pause = Pause(server, self._calls)
        self._run = settings.run
        self._limits = limits
        self._tensors = tensors
        self._numbers = itertools.count()
        self._preemptions = 0

    @classmethod
    async def start(cls, settings: EngineSettings) -> Self:
        """Loads the model.

        Raises: ConfigError when there is no SGLang, or for unsupported settings; EngineError when the server does not
        start within `rollout.engine.start_deadline_s`, or has no room for a whole context.
        """
        check_settings(settings)
        python = await interpreter(settings.engine.python)
        with without_remote_code(settings.model):
            architecture = AutoConfig.from_pretrained(settings.model, trust_remote_code=False)
        text, context = architecture.get_text_config(decoder=True), settings.engine.max_model_len
        check_positions(context, text, settings.model)  # SGLang crashes on the first answer that is too long
        gpu = torch.cuda.is_available()
        nccl = uses_nccl(settings, gpu=gpu)
        command = start_command(settings, text, python=python, gpu=gpu)
        tensors = Tensors.of(architecture)
        server = await ServerProcess.start(command, deadline_s=settings.engine.start_deadline_s)
        engine = cls(server, settings, PromptLimits(vocabulary=text.vocab_size, context=context), tensors)
        try:
            info = server_info(await engine._calls.get(INFO))
            engine._check_room(info)
            if nccl:
                engine.direct = DirectTransport("nccl_sglang", info.tp_size)
                engine._transfer = SglangTransfer(engine._calls, engine._pause, tensors, workers=info.tp_size)
        except (EngineError, asyncio.CancelledError):
            await engine.close()
            raise
        return engine

    @property
    def version(self) -> int:
        return self._pause.version

    async def generate(self, request: Request) -> list[Completion]:
        self._calls.check_alive()
        self._limits.check(request.prompt_ids)
        version, stops = self.version, self.generation.stop_token_ids
        drafts = {requests.request_id(next(self._numbers)): Draft(stops) for _ in range(request.samples)}
        in_flight = InFlight(version, lambda: [draft.unfinished(version) for draft in drafts.values()])
        if request.deadline_s <= 0:
            return in_flight.so_far()
        bodies = [
            requests.generate_request(name, request, self.generation, context=self._limits.context) for name in drafts
        ]
        abort = partial(self._abort, list(drafts))
        self._pause.in_flight.add(in_flight)
        try:
            async with self._calls.classified(), abort_at(abort, deadline_s=request.deadline_s), abort_on_error(abort):
                patience_s = request.deadline_s + self._calls.deadline_s
                await all_or_none(
                    self._client.stream(requests.GENERATE, body, draft.take, deadline_s=patience_s)
                    for body, draft in zip(bodies, drafts.values(), strict=True)
                )
                return [draft.completion() for draft in drafts.values()]
        except EngineError as error:
            error.unfinished = in_flight.left(self.version)
            raise
        finally:
            self._pause.in_flight.discard(in_flight)
            self._preemptions += sum(draft.preemptions for draft in drafts.values())

    async def _load(self, manifest: Manifest, staging: Staging) -> float:
        self._calls.check_alive()
        self._tensors.check(manifest)
        async with weights_folder(self._run, manifest, staging) as folder, self._pause.or_crash(manifest):
            await self._pause.begin()
            await self._calls.post(requests.UPDATE, requests.update_request(str(folder), manifest.version))
            return await self._pause.end(manifest.version)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self._limits.check(token_ids)
        return prompt_logprobs(await self._calls.post(requests.GENERATE, requests.score_request(token_ids)), token_ids)

    async def pressure(self) -> Pressure:
        """As `Engine.pressure`; preemptions are counted when an answer ends."""
        # The loads come without the scheduler: this call detects one that hangs.
        await self._calls.get(INFO)
        usage = cache_usage(await self._calls.get(requests.LOADS))
        return Pressure(kv_cache_usage=usage, preemptions=self._preemptions)

    async def close(self) -> None:
        """Ends the server with all its processes; pending requests fail."""
        with suppress(EngineError):  # it may have crashed; requests that continue would only delay its end
            self._calls.check_alive()
            self._calls.fail("SGLang was closed")  # first: an answer that is aborted now does not count
            await self._client.post(requests.ABORT, {"abort_all": True}, deadline_s=_ABORT_S)
        await self.server.close()

    def _check_room(self, info: ServerInfo) -> None:
        """Raises: EngineError when SGLang would cut answers silently before the context ends."""
        if info.max_req_input_len < self._limits.context:
            raise EngineError(
                f"SGLang has room for sequences of {info.max_req_input_len} tokens, not for "
                f"rollout.engine.max_model_len={self._limits.context}; lower it, or raise rollout.engine.kv_cache_bytes"
            )

    async def _abort(self, names: Sequence[str]) -> None:
        with suppress(EngineError):  # its streams raise it too
            async with self._calls.until_crash():
                # While it is paused, SGLang never aborts a request that has just arrived, not even afterwards.
                await self._pause.generating.wait()
                await all_or_none(
                    self._client.post(requests.ABORT, requests.abort_request(name), deadline_s=_ABORT_S)
                    for name in names
                )


Abort = Callable[[], Awaitable[None]]
_ABORT_EVERY_S = 0.1


@asynccontextmanager
async def abort_at(abort: Abort, *, deadline_s: float) -> AsyncIterator[None]:
    """Aborts the streams inside from the deadline on; they end with their tokens so far.

    `abort` must not fail: the stream reports the error too.
    """
    aborting = asyncio.create_task(_abort_from(deadline_s, abort))
    try:
        yield
    finally:
        aborting.cancel()


@asynccontextmanager
async def abort_on_error(abort: Abort) -> AsyncIterator[None]:
    """Aborts the streams inside when one fails or is cancelled: SGLang does not notice a closed connection."""
    try:
        yield
    except (EngineError, asyncio.CancelledError):
        await abort()
        raise


async def _abort_from(deadline_s: float, abort: Abort) -> None:
    await asyncio.sleep(deadline_s)
    # Repeated: an abort that arrives before its request has no effect.
    while True:
        await abort()
        await asyncio.sleep(_ABORT_EVERY_S)


async def all_or_none(calls: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Awaits calls concurrently; the first failure cancels the others and is raised."""
    # Not a TaskGroup: before Python 3.13, a failure leaves its task marked as cancelled, and a timeout around it can't
    # be told from a cancellation. Source: docs.python.org/3/library/asyncio-task.html#task-groups.
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
