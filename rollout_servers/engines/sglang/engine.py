"""SGLang behind its own HTTP server, through its native API.

Weights come through host memory, and SGLang reads them from there; or straight into its workers' (`direct.py`).
"""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

import torch
from transformers import AutoConfig

from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.configs.models import without_remote_code
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import (
    Completion,
    DirectSource,
    DirectTransport,
    EngineError,
    Generation,
    Pressure,
    PromptLimits,
    TensorSource,
    check_positions,
    check_update,
    host_tensors,
    refuse_group,
)
from slipstream.rollout_servers.engines.sglang import protocol as requests
from slipstream.rollout_servers.engines.sglang.arguments import check_settings, interpreter, start_command
from slipstream.rollout_servers.engines.sglang.inflight import InFlight, abort_at, abort_on_error, all_or_none
from slipstream.rollout_servers.engines.sglang.protocol import (
    Draft,
    ServerInfo,
    cache_usage,
    prompt_logprobs,
    server_info,
)
from slipstream.rollout_servers.engines.sglang.server import Calls, ServerProcess
from slipstream.rollout_servers.engines.sglang.transfer import (
    Pause,
    SglangTransfer,
    Tensors,
    uses_nccl,
    weights_folder,
)

_ABORT_S = 5.0
"""How long those who give a request up wait until the server has heard of it."""


class SglangEngine:
    """SGLang behind its own HTTP server.

    Attributes:
        generation: how answers are drawn from now on.
        shares_memory: no; it is handed a file that is made of the staged bytes.
        direct: the way over NCCL, if it was asked for.
        server: its process.
    """

    shares_memory = False

    def __init__(
        self, server: ServerProcess, generation: Generation, config: RunConfig, limits: PromptLimits, tensors: Tensors
    ) -> None:
        self.generation = generation
        self.direct: DirectTransport | None = None
        self._transfer: SglangTransfer | None = None
        self.server = server
        self._client = server.client
        self._calls = Calls(server, update_deadline_s=config.weights.deadline_s)
        self._pause = Pause(server, self._calls)
        self._run = config.run.name
        self._limits = limits
        self._tensors = tensors
        self._numbers = itertools.count()
        self._preemptions = 0

    @classmethod
    async def start(cls, config: RunConfig, model: Path, generation: Generation) -> Self:
        """Loads the model.

        Raises: ConfigError when there is no SGLang, or for what it can't do; EngineError when the server does not
        start, takes longer than `rollout.engine.start_deadline_s`, or has no room for a whole context.
        """
        check_settings(config)
        python = await interpreter(config)
        with without_remote_code(model):
            architecture = AutoConfig.from_pretrained(model, trust_remote_code=False)
        text = architecture.get_text_config(decoder=True)
        check_positions(config, text, model)  # SGLang dies of the first answer that is too long
        gpu = torch.cuda.is_available()
        nccl = uses_nccl(config, gpu=gpu)
        command = start_command(config, model, text, python=python, gpu=gpu)
        tensors = Tensors.of(architecture)
        server = await ServerProcess.start(command, deadline_s=config.rollout.engine.start_deadline_s)
        limits = PromptLimits(vocabulary=text.vocab_size, context=config.rollout.engine.max_model_len)
        engine = cls(server, generation, config, limits, tensors)
        try:
            info = server_info(await engine._calls.get(requests.INFO))
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
        """The policy version that new tokens come from."""
        return self._pause.version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        samples: int,
        greedy: bool,
        deadline_s: float,
        max_tokens: int | None = None,
    ) -> list[Completion]:
        """As `Engine.generate` says."""
        self._calls.check_alive()
        self._limits.check(prompt_ids)
        version = self.version
        stops = self.generation.stop_token_ids
        drafts = {requests.request_id(next(self._numbers)): Draft(stops) for _ in range(samples)}
        in_flight = InFlight(version, lambda: [draft.unfinished(version) for draft in drafts.values()])
        if deadline_s <= 0:
            return in_flight.so_far()
        bodies = [
            requests.generate_request(
                request,
                prompt_ids,
                self.generation,
                greedy=greedy,
                max_tokens=max_tokens,
                context=self._limits.context,
            )
            for request in drafts
        ]
        abort = partial(self._abort, list(drafts))
        self._pause.in_flight.add(in_flight)
        try:
            async with self._calls.classified(), abort_at(abort, deadline_s=deadline_s), abort_on_error(abort):
                patience_s = deadline_s + self._calls.deadline_s
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

    async def join(self, group: Form) -> None:
        """As `Engine.join`; generation stands still while the workers connect to the others."""
        if self._transfer is None:
            raise refuse_group("sglang", group)
        await self._transfer.join(group)

    async def install(self, version: int, manifest: Manifest, tensors: TensorSource) -> float:
        """As `Engine.install`; the server is ended when an update fails half-way."""
        check_update("sglang", version, manifest)
        if isinstance(tensors, DirectSource) and self._transfer is not None:
            return await self._transfer.install(manifest, tensors)
        staging = host_tensors("sglang", tensors)
        self._calls.check_alive()
        self._tensors.check(manifest)
        async with weights_folder(self._run, manifest, staging) as folder, self._pause.or_crash(manifest):
            await self._pause.begin()
            await self._calls.post(requests.UPDATE, requests.update_request(str(folder), manifest.version))
            return await self._pause.end(manifest.version)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log-prob of each token but the first, given those before it, at temperature 1. Raises: EngineError."""
        self._limits.check(token_ids)
        return prompt_logprobs(await self._calls.post(requests.GENERATE, requests.score_request(token_ids)), token_ids)

    async def checksums(self) -> None:
        """SGLang fuses the tensors that it is given."""

    async def pressure(self) -> Pressure:
        """How close the engine is to its limits; preemptions count once the answer ends. Raises: EngineError."""
        # Beside the loads, which SGLang tells without its scheduler: nobody else would notice one that hangs.
        await self._calls.get(requests.INFO)
        usage = cache_usage(await self._calls.get(requests.LOADS))
        return Pressure(kv_cache_usage=usage, preemptions=self._preemptions)

    async def close(self) -> None:
        """Ends the server with all its processes; whoever still waits hears of it."""
        with suppress(EngineError):  # it may be dead; requests that go on would only hold up its end
            self._calls.check_alive()
            self._calls.fail("SGLang was closed")  # first: what is aborted now is no answer
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
        with suppress(EngineError):  # its streams hear of it too
            async with self._calls.until_crash():
                # While it is paused, SGLang does not abort a request that has just come, nor ever again.
                await self._pause.generating.wait()
                await all_or_none(
                    self._client.post(requests.ABORT, requests.abort_request(name), deadline_s=_ABORT_S)
                    for name in names
                )
