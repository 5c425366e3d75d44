"""Weights over NCCL, straight into the memory of vLLM's GPU workers, by vLLM's own transfer engine."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from torch import nn
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.rollout_servers.engines.base import DirectSource, UpdateFailed
from slipstream.rollout_servers.engines.rendezvous import await_rendezvous
from slipstream.rollout_servers.engines.vllm.core import Core

NAME = "vllm/process"
DEADLINES = 2
"""A call may take so many deadlines of the group: the worker itself may wait for one for the last bucket."""


class NcclTransfer:
    """The receiving end of NCCL broadcasts."""

    def __init__(self, core: Core, *, keep_stale_kv: bool) -> None:
        self._core = core
        self._keep_stale_kv = keep_stale_kv
        self._joined = False

    @property
    def workers(self) -> int:
        """Tensor- and pipeline-parallel ranks of the engine."""
        return int(self._core.llm.vllm_config.parallel_config.world_size)

    async def join(self, group: Form) -> None:
        """Enters a transfer group; generation stands still while the workers connect to the others.

        Raises: UpdateFailed, EngineError.
        """
        self._joined = False
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
        self._joined = True

    async def install(self, manifest: Manifest, source: DirectSource) -> float:
        """Receives a version into the workers' memory while generation is paused; returns the pause in seconds.

        Raises: UpdateFailed, EngineError.
        """
        if not self._joined:
            raise UpdateFailed(f"vLLM's workers can't receive version {manifest.version}: they are in no group")
        llm = self._core.llm
        request = WeightTransferUpdateRequest(
            update_info={
                "names": [tensor.name for tensor in manifest.tensors],
                "dtype_names": [tensor.dtype for tensor in manifest.tensors],
                "shapes": [tensor.shape for tensor in manifest.tensors],
            }
        )
        paused_at = time.perf_counter()
        await self._core.pause(clear_cache=not self._keep_stale_kv)
        async with self._core.all_or_death(manifest.version):
            await self._core.call(llm.start_weight_update())
            await self._core.call(llm.update_weights(request))
            await source.approval()
            await self._core.call(llm.finish_weight_update())
            await self._core.set_version(manifest.version)
            await self._core.resume()
        return time.perf_counter() - paused_at

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
