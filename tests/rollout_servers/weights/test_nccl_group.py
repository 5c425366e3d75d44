"""vLLM's workers are sent into a transfer group once all of its members are there."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.buffer.wire.weights.protocol import Form
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.broadcast import NcclTransport
from slipstream.rollout_servers.engines.base import EngineError, UpdateFailed
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
        self.connecting = asyncio.Event()
        self.connect = asyncio.Event()
        self.connect.set()
        self.deaths: list[str] = []
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
        self.connecting.set()
        await self.connect.wait()
        self.groups += 1

    def crashed(self, reason: str) -> EngineError:
        self.deaths.append(reason)
        return EngineError(reason)

    async def _shut_down(self) -> None:
        self.groups = 0


def form(config: WeightsConfig, epoch: int, *, rank: int, deadline_s: float = DEADLINE_S) -> Form:
    return Form(
        transfer=1, epoch=epoch, transport="nccl", host=config.host, port=config.store_port, rank=rank, world=4,
        deadline_s=deadline_s,
    )  # fmt: skip


@pytest.fixture
def config() -> WeightsConfig:
    return WeightsConfig(store_port=free_port(), deadline_s=DEADLINE_S)


@pytest.fixture
def learner(config: WeightsConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclTransport]:
    nccl = "slipstream.learner.weights.broadcast"
    monkeypatch.setattr(f"{nccl}.new_id", lambda: ID)
    monkeypatch.setattr(f"{nccl}.communicator", lambda *arguments: SimpleNamespace(destroy=lambda: None))
    learner = NcclTransport(config)
    yield learner
    learner.close()


async def test_workers_get_learner_id_only_for_complete_groups(config: WeightsConfig, learner: NcclTransport) -> None:
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    from slipstream.rollout_servers.engines.vllm.process import NcclTransfer

    cores: list[Any] = [Core(workers=2), Core(workers=1)]
    one, other = (NcclTransfer(core, keep_stale_kv=False) for core in cores)
    forming = asyncio.ensure_future(asyncio.to_thread(learner.form, 1, 4))
    while not forming.done():
        learner.abort()
        await asyncio.wait([forming], timeout=0.02)
    assert isinstance(forming.exception(), TransferError)
    with pytest.raises(UpdateFailed, match=r"the learner gave it up: .* was aborted"):
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
    assert [core.deaths for core in cores] == [[], []]


async def test_engine_fails_when_group_is_left_while_connecting(config: WeightsConfig, learner: NcclTransport) -> None:
    from slipstream.rollout_servers.engines.vllm.process import NcclTransfer

    core: Any = Core(workers=3)
    core.connect.clear()  # the other server has died since they met
    joining = asyncio.ensure_future(NcclTransfer(core, keep_stale_kv=False).join(form(config, 1, rank=1)))
    await asyncio.to_thread(learner.form, 1, 4)
    async with asyncio.timeout(DEADLINE_S):
        await core.connecting.wait()
    assert core.deaths == []
    joining.cancel()  # as the learner's next question does
    await asyncio.wait([joining])
    assert joining.cancelled()
    assert len(core.deaths) == 1


async def test_engine_fails_when_workers_connect_too_late(
    config: WeightsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.rollout_servers.engines.vllm import process as direct

    core: Any = Core(workers=1)
    core.connect.clear()  # the learner has died since they met
    monkeypatch.setattr(direct, "await_rendezvous", AsyncMock(return_value=""))
    transfer = direct.NcclTransfer(core, keep_stale_kv=False)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineError, match=r"did not connect to the others within 0\.1 s"):
            await transfer.join(form(config, 1, rank=1, deadline_s=0.1))
    assert len(core.deaths) == 1
