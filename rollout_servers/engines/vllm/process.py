"""vLLM's AsyncLLM: the engine core runs in a process of its own, beside the server's event loop."""

import asyncio
import itertools
import time
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn

from vllm import AsyncEngineArgs
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from slipstream.buffer.wire.weights import Form, Manifest
from slipstream.rollout_servers.engines.base import Completion, EngineError, RequestRefused, UpdateFailed
from slipstream.rollout_servers.engines.vllm.arguments import Generation
from slipstream.rollout_servers.engines.vllm.convert import (
    completions,
    join_info,
    sampling_params,
    token_prompt,
    update_info,
)

CALL_DEADLINE_S = 60.0


class ProcessEngine:
    """vLLM with its engine core in another process.

    Attributes:
        generation: how answers are drawn from now on.
    """

    def __init__(self, llm: AsyncLLM, generation: Generation, *, transport: str, bucket_bytes: int) -> None:
        self._llm = llm
        self.generation = generation
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._vocabulary = llm.model_config.get_vocab_size()
        self._request_numbers = itertools.count()
        self._version = 0
        self._call_deadline_s = CALL_DEADLINE_S
        self._paused_at = 0.0
        self._receiving: asyncio.Task[None] | None = None
        self._death: EngineError | None = None

    @classmethod
    async def start(
        cls, arguments: dict[str, Any], generation: Generation, *, bucket_bytes: int, deadline_s: float
    ) -> "ProcessEngine":
        """Loads the model. Raises: EngineError when that fails or takes longer than `deadline_s`."""
        try:
            async with asyncio.timeout(deadline_s):
                llm = await asyncio.to_thread(AsyncLLM.from_engine_args, AsyncEngineArgs(**arguments))
        except TimeoutError:
            raise EngineError(f"vLLM did not start within {deadline_s:.0f} s") from None
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(f"vLLM did not start: {error!r}") from error
        transport = arguments["weight_transfer_config"].backend
        engine = cls(llm, generation, transport=transport, bucket_bytes=bucket_bytes)
        await llm.update_weight_version("0")
        return engine

    @property
    def version(self) -> int:
        """The policy version that new tokens come from."""
        return self._version

    @property
    def workers(self) -> int:
        """Tensor- and pipeline-parallel ranks of the engine."""
        return int(self._llm.vllm_config.parallel_config.world_size)

    async def generate(
        self, prompt_ids: Sequence[int], *, samples: int, greedy: bool, deadline_s: float
    ) -> list[Completion]:
        """`samples` answers to one prompt; those that are not finished at the deadline are cut short.

        Cancelling aborts them all. Raises: RequestRefused, EngineError.
        """
        self._check_alive()
        prompt = token_prompt(prompt_ids, vocabulary=self._vocabulary)
        params = sampling_params(self.generation, samples=samples, greedy=greedy)
        try:
            answers = await self._llm.add_request(str(next(self._request_numbers)), prompt, params)
        except EngineDeadError as error:
            raise EngineError(f"vLLM died: {error!r}") from error
        except (VLLMClientError, ValueError) as error:
            raise RequestRefused(f"vLLM refused a request: {error}") from error
        try:
            return completions(await self._finished(answers, deadline_s=deadline_s))
        except asyncio.CancelledError:
            await self._llm.abort(answers.request_id, internal=True)
            raise

    async def _finished(self, answers: RequestOutputCollector, *, deadline_s: float) -> Any:
        try:
            try:
                async with asyncio.timeout(deadline_s):
                    return await answers.get()
            except TimeoutError:
                # All that it came to is in the collector afterwards, if it did not finish at this very moment.
                await self._llm.abort(answers.request_id, internal=True)
                return await answers.get()
        except Exception as error:  # whatever ended vLLM's output handler
            raise EngineError(f"vLLM died: {error!r}") from error

    async def join(self, group: Form) -> None:
        """Enters a transfer group in the background (gloo), or waits for the others in it (nccl)."""
        if self._receiving is not None:
            self._die("a transfer over nccl broke off and can't be taken back; start this server again")
        # Twice: the worker itself may wait that long for the last bucket.
        self._call_deadline_s = 2 * group.deadline_s
        info = join_info(group, bucket_bytes=self._bucket_bytes)
        await self._call(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info)))

    async def receive(self, manifest: Manifest) -> None:
        """Starts to receive a version: in the background (gloo), or straight into the paused engine (nccl)."""
        info = update_info(manifest, self._transport)
        if self._transport == "gloo":
            await self._call(self._llm.collective_rpc("stage_weights", kwargs={"update_info": info}))
        else:
            await self._pause()
            self._receiving = asyncio.create_task(self._update(info))

    async def apply(self, manifest: Manifest) -> float:
        """Makes a received version the one that generates; returns seconds that generation stood still."""
        if self._receiving is None:
            await self._pause()
        try:
            if self._receiving is None:
                await self._update(update_info(manifest, self._transport))
            else:
                await self._receiving
                self._receiving = None
            await self._call(self._llm.finish_weight_update(weight_version=str(manifest.version)))
            await self._resume()
        except UpdateFailed as error:
            self._die(f"vLLM is left with half of version {manifest.version}: {error}")
        self._version = manifest.version
        return time.perf_counter() - self._paused_at

    async def close(self) -> None:
        """Ends the engine's processes."""
        # First: it would log the death that we are about to cause as an error.
        for task in (self._receiving, self._llm.output_handler):
            if task is not None:
                task.cancel()
        await asyncio.to_thread(self._llm.shutdown)

    async def _pause(self) -> None:
        """Stops generation and takes the model apart; generation goes on if that fails. Raises: UpdateFailed."""
        self._paused_at = time.perf_counter()
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=True))
        try:
            await self._call(self._llm.start_weight_update())
        except UpdateFailed:
            await self._resume()
            raise

    async def _update(self, info: dict[str, Any]) -> None:
        await self._call(self._llm.update_weights(WeightTransferUpdateRequest(update_info=info)))

    async def _resume(self) -> None:
        await self._call(self._llm.resume_generation())

    async def _call(self, call: Coroutine[Any, Any, Any]) -> None:
        """Raises: UpdateFailed when vLLM could not do it, EngineError when it is dead or does not answer."""
        try:
            self._check_alive()
            async with asyncio.timeout(self._call_deadline_s):
                await call
        except TimeoutError:
            self._die(f"vLLM's engine core did not answer within {self._call_deadline_s:.0f} s")
        except EngineDeadError as error:
            self._die(f"vLLM died: {error!r}")
        except EngineError:
            raise
        except Exception as error:
            raise UpdateFailed(f"vLLM failed: {error!r}") from error
        finally:
            call.close()

    def _die(self, reason: str) -> NoReturn:
        self._death = EngineError(reason)
        raise self._death

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death
