"""SGLang behind its own HTTP server, through its native API."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from transformers import AutoConfig

from slipstream.buffer.wire.weights.protocol import Manifest
from slipstream.models.folder import without_remote_code
from slipstream.rollout_servers.engines.base import (
    NOTHING,
    BaseEngine,
    Completion,
    DirectTransport,
    EngineError,
    EngineSettings,
    ExpertReader,
    Pressure,
    PromptLimits,
    Request,
    RequestRefused,
    UpdateFailed,
    check_positions,
)
from slipstream.rollout_servers.engines.sglang import protocol as requests
from slipstream.rollout_servers.engines.sglang.arguments import INFO, check_settings, interpreter, start_command
from slipstream.rollout_servers.engines.sglang.protocol import (
    Draft,
    ServerInfo,
    prompt_logprobs,
    server_info,
    server_load,
)
from slipstream.rollout_servers.engines.sglang.server import Calls, ServerProcess
from slipstream.rollout_servers.engines.sglang.transfer import (
    InFlight,
    Pause,
    SglangTransfer,
    Tensors,
    expert_reader,
    uses_nccl,
    weights_folder,
)
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.engines.supervisor import stitch

_ABORT_S = 5.0
"""Time limit of an abort."""


class SglangEngine(BaseEngine):
    """SGLang behind its own HTTP server; weights have no checksums, because it fuses tensors.

    Attributes:
        server: the server's process.
    """

    name = "sglang"

    def __init__(self, server: ServerProcess, settings: EngineSettings, limits: PromptLimits, tensors: Tensors) -> None:
        super().__init__(settings.generation, adapts=settings.config.model.lora is not None)
        self.server = server
        self._client = server.client
        self._calls = Calls(server, update_deadline_s=settings.config.weights.deadline_s)
        self._pause = Pause(server, self._calls)
        self._run = settings.config.run.name
        self._limits = limits
        self._tensors = tensors
        self._numbers = itertools.count()
        self._preemptions = 0
        self._experts: ExpertReader | None = None

    @classmethod
    async def start(cls, settings: EngineSettings) -> Self:
        """Loads the model.

        Raises: ConfigError when there is no SGLang, or for unsupported settings; EngineError when the server does not
        start within `rollout.engine.start_deadline_s`, or has no room for a whole context.
        """
        check_settings(settings)
        python = await interpreter(settings.config.rollout.engine.python)
        with without_remote_code(settings.model):
            architecture = AutoConfig.from_pretrained(settings.model, trust_remote_code=False)
        text, context = architecture.get_text_config(decoder=True), settings.config.rollout.engine.max_model_len
        check_positions(context, text, settings.model)  # SGLang crashes on the first answer that is too long
        gpu = torch.cuda.is_available()
        nccl = uses_nccl(settings, gpu=gpu)
        experts = expert_reader(architecture) if settings.config.learner.router_replay else None
        command = start_command(settings, text, python=python, gpu=gpu)
        tensors = Tensors.of(architecture)
        server = await ServerProcess.start(command, deadline_s=settings.config.rollout.engine.start_deadline_s)
        engine = cls(server, settings, PromptLimits(vocabulary=text.vocab_size, context=context), tensors)
        engine._experts = experts
        try:
            info = server_info(await engine._calls.get(INFO))
            engine._check_room(info)
            if nccl and settings.config.rollout.engine.direct is not None:
                engine.direct = DirectTransport(settings.config.rollout.engine.direct, info.tp_size)
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
        clock = asyncio.get_running_loop()
        until, answers = clock.time() + request.deadline_s, [NOTHING] * request.samples
        while True:
            version, left_s = self.version, until - clock.time()
            answers = await self._continue(replace(request, deadline_s=left_s), answers)
            # Another adapter ends all answers; they continue with it.
            if not self._adapts or self.version == version or all(each.finish_reason != "abort" for each in answers):
                return answers

    async def _continue(self, request: Request, begun: Sequence[Completion]) -> list[Completion]:
        """Continues unfinished answers to a request, with the present weights."""
        version = self.version
        of_all, adapter = (version, requests.adapter_name(version)) if self._adapts else (None, None)
        answers = [self._limited(request, answer) for answer in begun]
        drafts = {
            requests.request_id(next(self._numbers)): (number, self._draft(request, answer, version=of_all))
            for number, answer in enumerate(answers)
            if answer.finish_reason == "abort"
        }

        def joined(complete: Callable[[Draft], Completion]) -> list[Completion]:
            news = {number: complete(draft) for number, draft in drafts.values()}
            return [stitch(each, news[number]) if number in news else each for number, each in enumerate(answers)]

        begun_tokens = sum(len(answer.token_ids) for answer in answers)
        request.tally.follow(lambda: begun_tokens + sum(draft.tokens for _, draft in drafts.values()))
        in_flight = InFlight(version, lambda: joined(lambda draft: draft.unfinished(version)))
        if request.deadline_s <= 0 or not drafts:
            return in_flight.so_far()
        bodies = [
            requests.generate_request(
                name,
                replace(request, prompt_ids=[*request.prompt_ids, *answers[number].token_ids]),
                self.generation,
                context=self._limits.context,
                begun=len(answers[number].token_ids),
                adapter=adapter,
                return_experts=self._experts is not None,
            )
            for name, (number, _) in drafts.items()
        ]
        abort = partial(self._abort, list(drafts))
        aborting = abort_at(abort, deadline_s=request.deadline_s, superseded=in_flight.superseded)
        self._pause.in_flight.add(in_flight)
        try:
            async with self._calls.classified(), aborting, abort_on_error(abort):
                timeout_s = request.deadline_s + self._calls.deadline_s
                await all_or_none(
                    self._client.stream(requests.GENERATE, body, draft.take, deadline_s=timeout_s)
                    for body, (_, draft) in zip(bodies, drafts.values(), strict=True)
                )
                return joined(Draft.completion)
        except EngineError as error:
            error.unfinished = in_flight.so_far() if self._adapts else in_flight.left(self.version)
            raise
        finally:
            self._pause.in_flight.discard(in_flight)
            in_flight.ended.set()
            self._preemptions += sum(draft.preemptions for _, draft in drafts.values())

    def _draft(self, request: Request, begun: Completion, *, version: int | None) -> Draft:
        """The continuation of an answer; `version`: of all its tokens, None: SGLang's version spans."""
        return Draft(
            self.generation.stop_token_ids,
            version=version,
            experts=self._experts,
            prompt_tokens=len(request.prompt_ids) + len(begun.token_ids),
        )

    def _limited(self, request: Request, begun: Completion) -> Completion:
        """An answer, finished where its limit left no room for another token."""
        most = self.generation.max_tokens if request.max_tokens is None else request.max_tokens
        room = min(most, self._limits.context - len(request.prompt_ids)) - len(begun.token_ids)
        return replace(begun, finish_reason="length") if begun.finish_reason == "abort" and room <= 0 else begun

    async def _load_adapter(self, manifest: Manifest, staging: Staging) -> float:
        """Loads an adapter beside the one before, switches all requests to it, and unloads that one."""
        async with weights_folder(self._run, manifest, staging) as folder:
            try:
                body = requests.load_adapter_request(str(folder), manifest.version)
                await self._calls.post(requests.LOAD_ADAPTER, body)
            except RequestRefused as error:
                raise UpdateFailed(f"SGLang did not load the adapter of version {manifest.version}: {error}") from error
        before = self.version
        stall_s = await self._pause.switch(manifest.version)
        if before:
            with suppress(RequestRefused):
                await self._calls.post(requests.UNLOAD_ADAPTER, requests.unload_adapter_request(before))
        return stall_s

    async def _load(self, manifest: Manifest, staging: Staging) -> float:
        self._calls.check_alive()
        if manifest.adapter is not None:
            return await self._load_adapter(manifest, staging)
        self._tensors.check(manifest)
        async with weights_folder(self._run, manifest, staging) as folder, self._pause.or_crash(manifest):
            await self._pause.begin()
            await self._calls.post(requests.UPDATE, requests.update_request(str(folder), manifest.version))
            return await self._pause.end(manifest.version)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self._limits.check(token_ids)
        adapter = requests.adapter_name(self.version) if self._adapts else None
        body = requests.score_request(token_ids, adapter=adapter)
        return prompt_logprobs(await self._calls.post(requests.GENERATE, body), token_ids)

    async def pressure(self) -> Pressure:
        """As `Engine.pressure`; preemptions are counted when an answer ends."""
        # The loads come without the scheduler: this call detects one that hangs.
        await self._calls.get(INFO)
        load = server_load(await self._calls.get(requests.LOADS))
        return Pressure(load.token_usage, self._preemptions, load.num_running_reqs, load.num_waiting_reqs)

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
async def abort_at(abort: Abort, *, deadline_s: float, superseded: asyncio.Event | None = None) -> AsyncIterator[None]:
    """Aborts the streams inside from the deadline on, or from `superseded`; they end with their tokens so far.

    `abort` must not fail: the stream reports the error too.
    """
    aborting = asyncio.create_task(_abort_from(deadline_s, superseded or asyncio.Event(), abort))
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


async def _abort_from(deadline_s: float, superseded: asyncio.Event, abort: Abort) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            await superseded.wait()
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
