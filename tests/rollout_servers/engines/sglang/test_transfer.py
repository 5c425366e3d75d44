"""What a server is asked on the way straight into SGLang, and what becomes of one that does not do it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.buffer.wire.weights.protocol import Form, Manifest, TensorInfo
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import DirectSource, EngineError, Request, UpdateFailed
from slipstream.rollout_servers.engines.sglang import protocol as requests
from slipstream.rollout_servers.engines.sglang.engine import SglangEngine
from slipstream.rollout_servers.engines.sglang.transfer import SglangTransfer, uses_nccl
from tests.contract.policies import write_policy
from tests.rollout_servers.engines.sglang.stubbed import LONG_S, engine_over_stub, heard
from tests.rollout_servers.engines.sglang.test_arguments import settings

DIRECT = "slipstream.rollout_servers.engines.sglang.transfer"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    write_policy(folder, tied=False)
    return folder


@pytest.fixture(autouse=True)
def met(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks with which all others of a group were met."""
    ranks_met: list[int] = []

    async def meet(group: Form, *, ranks: int) -> str:
        ranks_met.append(ranks)
        return ""

    monkeypatch.setattr(f"{DIRECT}.await_rendezvous", meet)
    return ranks_met


def transfer_of(engine: SglangEngine, *, workers: int = 1) -> SglangTransfer:
    return SglangTransfer(engine._calls, engine._pause, engine._tensors, workers=workers)


def form(epoch: int, *, deadline_s: float = LONG_S) -> Form:
    return Form(
        transfer=1, epoch=epoch, transport="nccl_sglang", host="127.0.0.1", port=1, rank=1, world=2,
        deadline_s=deadline_s,
    )  # fmt: skip


def version(engine: SglangEngine, number: int, *, left_out: Sequence[str] = ()) -> Manifest:
    """One of the engine's model, in several buckets."""
    shapes = engine._tensors.shapes.items()
    tensors = [TensorInfo(name, "float32", list(shape)) for name, shape in shapes if name not in left_out]
    return Manifest(version=number, tensors=tensors, bucket_bytes=1 << 20, evaluate=False)


async def test_versions_come_between_a_beginning_and_an_end_through_the_group_that_was_entered_last(
    model: Path, tmp_path: Path, met: list[int]
) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        transfer = transfer_of(engine, workers=2)
        for number in (1, 2):
            await transfer.join(form(number))
            manifest = version(engine, number)
            source = DirectSource("nccl_sglang")
            installing = asyncio.create_task(transfer.install(manifest, source))
            await source.received.wait()
            assert engine.version == number - 1
            source.approved.set()
            assert await installing > 0
            assert engine.version == number
        asked = [path for path in await heard(engine) if path != requests.RECEIVE]
        update = [requests.PAUSE, requests.BEGIN_UPDATE, requests.END_UPDATE, requests.CONTINUE]
        assert asked == [requests.JOIN_GROUP, *update, requests.LEAVE_GROUP, requests.JOIN_GROUP, *update]
        assert (await heard(engine)).count(requests.RECEIVE) > 2
        assert met == [2, 2]


def test_only_the_last_bucket_makes_the_version_and_forgets_what_was_computed_before() -> None:
    tensors = [TensorInfo("a", "bfloat16", [2, 3]), TensorInfo("b", "float32", [4])]
    asked = requests.bucket_request(tensors, "epoch7")
    assert asked == {
        "names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 3], [4]], "group_name": "epoch7",
        "load_format": "flattened_bucket", "weight_version": None, "flush_cache": False,
    }  # fmt: skip
    last = requests.bucket_request(tensors, "epoch7", version=3)
    assert last == {**asked, "weight_version": "3", "flush_cache": True}


async def test_a_version_of_another_model_is_refused_before_anything_stands_still(model: Path, tmp_path: Path) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        transfer = transfer_of(engine)
        await transfer.join(form(1))
        with pytest.raises(UpdateFailed, match=r"version 1: no weights came for lm_head\.weight"):
            await transfer.install(version(engine, 1, left_out=["lm_head.weight"]), DirectSource("nccl_sglang"))
        assert await heard(engine) == [requests.JOIN_GROUP]


@pytest.mark.parametrize("refused", [requests.BEGIN_UPDATE, requests.RECEIVE, requests.END_UPDATE])
async def test_an_update_that_sglang_breaks_off_ends_it_and_waits_for_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setenv("STUB_REFUSES", refused)
    async with engine_over_stub(model, tmp_path) as engine:
        transfer, source = transfer_of(engine), DirectSource("nccl_sglang")
        source.approved.set()
        await transfer.join(form(1))
        with pytest.raises(EngineError, match=r"half of version 1: .*half of it is bad") as death:
            await transfer.install(version(engine, 1), source)
        assert not isinstance(death.value, UpdateFailed)
        with pytest.raises(EngineError, match="half of version 1"):
            await engine.generate(Request([3, 5], greedy=True, deadline_s=LONG_S))
        assert engine.server.ended.done()


async def test_a_group_that_sglang_cannot_enter_costs_nothing_but_the_group(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_REFUSES", requests.JOIN_GROUP)
    async with engine_over_stub(model, tmp_path) as engine:
        transfer = transfer_of(engine)
        with pytest.raises(UpdateFailed, match="half of it is bad"):
            await transfer.join(form(1))
        with pytest.raises(UpdateFailed, match="in no group"):
            await transfer.install(version(engine, 1), DirectSource("nccl_sglang"))
        assert (await engine.pressure()).kv_cache_usage == 0.5


async def test_workers_that_do_not_connect_in_time_are_ended(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_NEVER_ANSWERS", requests.JOIN_GROUP)
    async with engine_over_stub(model, tmp_path) as engine:
        with pytest.raises(EngineError, match=r"did not connect to the others within 0\.1 s"):
            await transfer_of(engine).join(form(1, deadline_s=0.1))
        assert engine.server.ended.done()


@pytest.mark.parametrize(
    ("options", "gpu", "reason"),
    [({}, False, "needs a GPU here"), ({"pp-size": 2}, True, r"rollout\.engine\.options\.pp-size=2")],
)
def test_what_nccl_cannot_do_is_said_at_once(options: dict[str, Any], gpu: bool, reason: str) -> None:
    engine = {"options": options}
    with pytest.raises(ConfigError, match=reason):
        uses_nccl(settings(engine, transport="nccl"), gpu=gpu)


def test_nccl_is_used_only_where_it_is_asked_for() -> None:
    assert not uses_nccl(settings(), gpu=True)


async def test_cancelled_direct_install_costs_the_engine(model: Path, tmp_path: Path) -> None:
    async with engine_over_stub(model, tmp_path) as engine:
        transfer, source = transfer_of(engine), DirectSource("nccl_sglang")
        await transfer.join(form(1))
        installing = asyncio.create_task(transfer.install(version(engine, 1), source))
        await source.received.wait()
        installing.cancel()
        await asyncio.wait([installing])
        with pytest.raises(EngineError, match="half of version 1"):
            await engine.generate(Request([3, 5], greedy=True, deadline_s=LONG_S))
