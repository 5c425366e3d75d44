"""vLLM's workers are sent into a transfer group once all of its members are there."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.buffer.wire.weights import Form
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.transports.base import TransferError
from slipstream.learner.weights.transports.nccl import NcclTransport
from slipstream.rollout_servers.engines.base import UpdateFailed
from tests.conftest import free_port

# vLLM and what it imports warn of their own futures.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

ID = bytes(range(128))
DEADLINE_S = 30.0


class Core:
    """Where vLLM's engine core would be: notes what its workers are told."""

    def __init__(self, workers: int) -> None:
        self.told: list[dict[str, Any]] = []
        self.groups = 0
        """How many communicators its workers keep."""
        self.deadline_s = 1.0
        parallel = SimpleNamespace(world_size=workers)
        self.llm = SimpleNamespace(
            vllm_config=SimpleNamespace(parallel_config=parallel),
            init_weight_transfer_engine=self._init,
            shutdown_weight_transfer_engine=self._shut_down,
        )

    async def call(self, call: Any) -> Any:
        return await call

    async def _init(self, request: Any) -> None:
        self.told.append(request.init_info)
        self.groups += 1

    async def _shut_down(self) -> None:
        self.groups = 0


def form(config: WeightsConfig, epoch: int, *, rank: int) -> Form:
    return Form(
        transfer=1, epoch=epoch, transport="nccl", host=config.host, port=config.store_port, rank=rank, world=4,
        deadline_s=DEADLINE_S,
    )  # fmt: skip


async def test_workers_know_each_other_by_the_learners_id_and_are_not_bothered_for_a_group_that_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    from slipstream.rollout_servers.engines.vllm.direct import NcclTransfer

    nccl = "slipstream.learner.weights.transports.nccl"
    monkeypatch.setattr(f"{nccl}.new_id", lambda: ID)
    monkeypatch.setattr(f"{nccl}.communicator", lambda *arguments: SimpleNamespace(destroy=lambda: None))
    config = WeightsConfig(store_port=free_port(), deadline_s=DEADLINE_S)
    learner = NcclTransport(config)
    cores: list[Any] = [Core(workers=2), Core(workers=1)]
    one, other = (NcclTransfer(core, keep_stale_kv=False) for core in cores)
    forming = asyncio.ensure_future(asyncio.to_thread(learner.form, 1, 4))
    while not forming.done():
        learner.abort()
        await asyncio.wait([forming], timeout=0.02)
    assert isinstance(forming.exception(), TransferError)
    with pytest.raises(UpdateFailed, match=r"the learner gave it up: .* was broken off"):
        await one.join(form(config, 1, rank=1))
    assert cores[0].told == []
    for epoch in (2, 3):
        async with asyncio.TaskGroup() as entering:
            entering.create_task(asyncio.to_thread(learner.form, epoch, 4))
            entering.create_task(one.join(form(config, epoch, rank=1)))
            entering.create_task(other.join(form(config, epoch, rank=3)))
        told = [NCCLWeightTransferInitInfo(**core.told[-1]) for core in cores]
        ranks = [(each.nccl_unique_id_bytes, each.rank_offset, each.world_size) for each in told]
        assert ranks == [(ID, 1, 4), (ID, 3, 4)]
        assert [core.groups for core in cores] == [1, 1], "the group before is given back"
    learner.close()
