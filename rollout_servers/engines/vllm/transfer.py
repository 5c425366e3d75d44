"""Weights over NCCL, straight into the memory of vLLM's GPU workers, by vLLM's own transfer engine."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from torch import nn
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.rollout_servers.engines.base import EngineError, UpdateFailed, check_update
from slipstream.rollout_servers.engines.rendezvous import await_rendezvous
from slipstream.rollout_servers.engines.vllm.core import Core

NAME = "vllm/process"
DEADLINES = 2
"""A call may take so many deadlines of the group: the worker itself may wait for one for the last bucket."""


class NcclTransfer:
    """The receiving end of NCCL broadcasts."""

    transport = "nccl"

    def __init__(self, core: Core, *, keep_stale_kv: bool) -> None:
        self._core = core
        self._keep_stale_kv = keep_stale_kv
        self._begun = False
        self._receiving: asyncio.Task[Any] | None = None
        self._paused_at = 0.0

    @property
    def workers(self) -> int:
        """Tensor- and pipeline-parallel ranks of the engine."""
        return int(self._core.llm.vllm_config.parallel_config.world_size)

    async def join(self, group: Form) -> None:
        """Enters a transfer group; generation stands still while the workers connect to the others.

        Raises: UpdateFailed, EngineError.
        """
        self._check_idle()
        unique_id = await await_rendezvous(group, ranks=self.workers)
        self._core.deadline_s = DEADLINES * group.deadline_s
        request = WeightTransferInitRequest(
            init_info={
                "nccl_unique_id_b64": unique_id,
                "rank_offset": group.rank,
                "world_size": group.world,
                "packed": True,
                "packed_buffer_size_bytes": group.bucket_bytes,
            }
        )
        # They would forget the communicator of the group before, and keep its memory.
        await self._in_workers(self._core.llm.shutdown_weight_transfer_engine())
        # Who they wait for may be dead, and nothing else ends their wait.
        try:
            async with asyncio.timeout(group.deadline_s):
                await self._in_workers(self._core.llm.init_weight_transfer_engine(request))
        except TimeoutError:
            reason = f"vLLM's workers did not connect to the others within {group.deadline_s:g} s"
            raise self._core.death(reason) from None
        except asyncio.CancelledError:  # the learner has given the group up
            self._core.death("a transfer group was given up while vLLM's workers were connecting to each other")
            raise

    async def begin(self, manifest: Manifest) -> None:
        """Stops generation, takes the model apart and starts to receive. Raises: UpdateFailed, EngineError."""
        check_update(NAME, manifest.version, manifest)
        self._check_idle()
        llm = self._core.llm
        self._paused_at = time.perf_counter()
        self._begun = True
        try:
            await self._core.pause(clear_cache=not self._keep_stale_kv)
            try:
                await self._in_workers(llm.start_weight_update())
            except UpdateFailed:
                await self._core.resume()
                raise
        except UpdateFailed:
            self._begun = False
            raise
        request = WeightTransferUpdateRequest(
            update_info={
                "names": [tensor.name for tensor in manifest.tensors],
                "dtype_names": [tensor.dtype for tensor in manifest.tensors],
                "shapes": [tensor.shape for tensor in manifest.tensors],
            }
        )
        self._receiving = asyncio.create_task(self._core.call(llm.update_weights(request)))
        # Who waits for it may be told to stop, and asyncio wants its error to be looked at.
        self._receiving.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def loaded(self, manifest: Manifest) -> None:
        """Waits for the last byte. Raises: EngineError, for the engine is left with half a version then."""
        assert self._receiving is not None, "after begin()"
        try:
            # Shielded: who stops waiting does not stop the workers, and nobody else can.
            await asyncio.shield(self._receiving)
        except UpdateFailed as error:
            raise self._half(error, manifest) from error

    async def finish(self, manifest: Manifest) -> float:
        """Generates on, with the version; returns seconds that generation stood still. Raises: EngineError."""
        try:
            await self._core.call(self._core.llm.finish_weight_update())
            await self._core.set_version(manifest.version)
            await self._core.resume()
        except UpdateFailed as error:
            raise self._half(error, manifest) from error
        self._begun, self._receiving = False, None
        return time.perf_counter() - self._paused_at

    async def _in_workers(self, call: Coroutine[Any, Any, Any]) -> None:
        """Raises: UpdateFailed when the only worker failed, EngineError when one of several did.

        vLLM reads the workers' answers up to the first error, and takes those that are left for the next call's.
        """
        try:
            await self._core.call(call)
        except UpdateFailed as error:
            if self.workers > 1:
                raise self._core.death(f"vLLM's workers are out of step: {error}") from error
            raise

    def _check_idle(self) -> None:
        if self._begun:
            raise self._core.death("a transfer over nccl broke off and can't be taken back")

    def _half(self, error: UpdateFailed, manifest: Manifest) -> EngineError:
        return self._core.death(f"vLLM is left with half of version {manifest.version}: {error}")


BACKEND = "slipstream_nccl"
"""The name under which vLLM's workers know `CompleteNccl`."""


class CompleteNccl(NCCLWeightTransferEngine):
    """vLLM's receiver of NCCL broadcasts, which does not look at what the model says that it has loaded."""

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receives a version. Raises: RuntimeError naming the parameters that no tensor came for."""
        model: Any = self.model
        load, loaded = model.load_weights, set[str]()

        def noted(tensors: Any) -> None:
            loaded.update(load(tensors))

        model.load_weights = noted
        try:
            super().receive_weights(update_info)
        finally:
            del model.load_weights  # the model's own, of its class, is there again
        check_complete(model, loaded, tied=is_tied(self.vllm_config))


def is_tied(vllm_config: Any) -> bool:
    """Whether the model's head is its embedding."""
    return bool(vllm_config.model_config.hf_text_config.tie_word_embeddings)


def check_complete(model: nn.Module, loaded: set[str], *, tied: bool) -> None:
    """Raises: RuntimeError naming the parameters that are not among those that were loaded, nor tied to one."""
    head = {"lm_head.weight"} if tied else set()
    missing = {name for name, _ in model.named_parameters()} - loaded - head
    if missing:
        raise RuntimeError(f"no weights came for {', '.join(sorted(missing))}")
