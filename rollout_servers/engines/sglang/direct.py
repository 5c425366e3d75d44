"""Weights over NCCL, straight into the memory of SGLang's workers.

SGLang's scheduler takes part in a broadcast and answers nothing meanwhile; one that does not come would hold it for
torch's 30 minutes. So all members of a group meet first, whoever breaks a broadcast off says so, and a server that is
left alone in one all the same is ended when the deadline has passed, and started again.
"""

import asyncio
from typing import Any

from slipstream.buffer.wire.weights import Form, Manifest, tensor_buckets
from slipstream.configs.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import EngineError, RequestRefused, UpdateFailed
from slipstream.rollout_servers.engines.http.calls import Calls
from slipstream.rollout_servers.engines.sglang import requests
from slipstream.rollout_servers.engines.sglang.arguments import require_one
from slipstream.rollout_servers.engines.sglang.standstill import Standstill
from slipstream.rollout_servers.engines.sglang.weights import Tensors
from slipstream.rollout_servers.weights.transports.meeting import meet_beside

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

    transport = "nccl_sglang"

    def __init__(self, calls: Calls, standstill: Standstill, tensors: Tensors, *, workers: int) -> None:
        self._calls = calls
        self._standstill = standstill
        self._tensors = tensors
        self.workers = workers
        self._group = ""
        self._begun = False
        self._receiving: asyncio.Task[Any] | None = None

    async def join(self, group: Form) -> None:
        """Enters a transfer group; generation stands still while the workers connect to the others.

        Raises: UpdateFailed, EngineError.
        """
        await self._require_idle()
        await meet_beside(group, ranks=self.workers)
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
            raise await self._standstill.die(reason) from None
        except asyncio.CancelledError:  # the learner has given the group up: nothing else ends their wait
            self._calls.die("a transfer group was given up while SGLang's workers were connecting to each other")
            raise
        self._group = requests.group_name(group)

    async def begin(self, manifest: Manifest) -> None:
        """Stops generation and starts to receive. Raises: UpdateFailed, EngineError."""
        await self._require_idle()
        self._tensors.check(manifest)
        self._begun = True
        async with self._standstill.or_death(manifest):
            await self._standstill.begin()
            await self._calls.post(requests.BEGIN_UPDATE, {})
        self._receiving = asyncio.create_task(self._receive(manifest))
        # Who waits for it may be told to stop, and asyncio wants its error to be looked at.
        self._receiving.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def _receive(self, manifest: Manifest) -> None:
        """Raises: EngineError."""
        *buckets, last = tensor_buckets(manifest.tensors, manifest.bucket_bytes)
        for bucket in buckets:
            await self._calls.post(requests.RECEIVE, requests.bucket_request(bucket, self._group))
        await self._calls.post(requests.RECEIVE, requests.bucket_request(last, self._group, version=manifest.version))

    async def loaded(self, manifest: Manifest) -> None:
        """Waits for the last byte. Raises: EngineError, for the engine is left with half a version then."""
        assert self._receiving is not None, "after begin()"
        try:
            # Shielded: who stops waiting does not stop the workers, and nobody else can.
            await asyncio.shield(self._receiving)
        except EngineError as error:
            raise await self._standstill.half(manifest, error) from error

    async def finish(self, manifest: Manifest) -> float:
        """Generates on, with the version; returns seconds that generation stood still. Raises: EngineError."""
        async with self._standstill.or_death(manifest):
            await self._calls.post(requests.END_UPDATE, {})
            stall_s = await self._standstill.end(manifest.version)
        self._begun, self._receiving = False, None
        return stall_s

    async def _require_idle(self) -> None:
        """Raises: EngineError."""
        if self._begun:
            raise await self._standstill.die("a transfer over nccl broke off and can't be taken back")
