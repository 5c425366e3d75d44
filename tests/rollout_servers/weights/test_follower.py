"""A rollout server's side of the weight channel, against a learner driven by hand."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from slipstream.buffer.wire.codec import decode
from slipstream.buffer.wire.sockets import bind_router
from slipstream.buffer.wire.weights import protocol as w
from slipstream.buffer.wire.weights.layout import host_identity
from slipstream.configs import RunConfig
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.transports import build_transports
from slipstream.rollout_servers.engines.base import DirectSource, EngineError, RequestRefused, UpdateFailed
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.weights.eval_hold import EvaluationHold
from slipstream.rollout_servers.weights.follower import WeightFollower
from tests.conftest import free_port
from tests.ipv6 import needs_ipv6
from tests.learner.weights.learner import Learner, gathered, wait_until
from tests.rollout_servers.scripted import LastingEngine
from tests.rollout_servers.weights.channel import DEADLINE_S, Channel, following

PROBE = w.Probe(token_ids=[1, 2, 3], logprobs=[-1.0, -2.0])


async def test_heartbeat_has_identity_versions_and_transports(channel: Channel) -> None:
    join = await channel.join()
    assert (join.server, join.incarnation, join.version, join.staged) == ("server-1", "first", 0, -1)
    assert join.host == host_identity()
    assert set(join.transports) == {"gloo", "ipc", "shm", "file", "stream"}
    await channel.asked(await channel.brought(3))
    joins = [await channel.join() for _ in range(2)]  # one may have been on its way
    assert (joins[-1].version, joins[-1].staged) == (3, 3)


@asynccontextmanager
async def running(config: RunConfig, engine: LastingEngine, hold: EvaluationHold) -> AsyncIterator[None]:
    """A rollout server's side of the channel, without a learner."""
    context = zmq.asyncio.Context()
    member = WeightFollower(config, "server-1", engine, hold, on_applied=lambda: None)
    task = asyncio.create_task(member.run(context))
    for _ in range(10):  # now it would have sent a heartbeat
        await asyncio.sleep(0)
    yield
    task.cancel()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.wait([task])
    assert task.cancelled()
    context.destroy(linger=0)


@asynccontextmanager
async def learning(folder: Path, engine: LastingEngine, hold: EvaluationHold, **weights: str) -> AsyncIterator[Learner]:
    """The learner of a server that runs."""
    ports = {port: free_port() for port in ("control_port", "store_port", "stream_port")}
    sections = {"model": {"path": folder}, "weights": {"deadline_s": DEADLINE_S, **weights, **ports}}
    config = RunConfig.model_validate({"run": {"name": f"members-{folder.name}"}, **sections})
    async with running(config, engine, hold):
        publisher = WeightPublisher(config.weights, config.security, build_transports(config), run=config.run.name)
        learner = Learner(config, publisher)
        await asyncio.to_thread(gathered, learner, "server-1")
        yield learner
    await asyncio.to_thread(learner.close)


async def test_late_learner_gets_current_heartbeat(tmp_path: Path, hold: EvaluationHold) -> None:
    config, engine, context = following(tmp_path), LastingEngine(), zmq.asyncio.Context()
    address = f"tcp://127.0.0.1:{config.weights.control_port}"
    async with running(config, engine, hold):
        engine.incarnation, engine.version = "second", 7
        with bind_router(context, address, max_message_bytes=1 << 20) as learner:
            async with asyncio.timeout(DEADLINE_S):
                _, frame = await learner.recv_multipart()
    join = decode(frame, w.FromServer)
    assert isinstance(join, w.Join)
    assert (join.incarnation, join.version) == ("second", 7)
    context.destroy(linger=0)


async def test_stop_without_learner_ends(tmp_path: Path, hold: EvaluationHold) -> None:
    async with running(following(tmp_path), LastingEngine(), hold):
        pass


@needs_ipv6
@pytest.mark.parametrize("transport", ["stream", "gloo"])
@pytest.mark.parametrize("bind", ["::1", "::"])
async def test_control_and_weights_travel_over_ipv6(
    tmp_path: Path, hold: EvaluationHold, transport: str, bind: str
) -> None:
    engine = LastingEngine()
    async with learning(tmp_path, engine, hold, host="::1", bind=bind, transport=transport) as learner:
        await asyncio.to_thread(learner.publish, 1)
        await asyncio.to_thread(learner.wait)
        assert (engine.version, learner.members()) == (1, {"server-1"})


async def test_version_is_received_on_announce_installed_on_apply(channel: Channel) -> None:
    apply = await channel.brought(3)
    assert channel.engine.version == 0
    assert await channel.asked(apply) == w.Applied(
        transfer=apply.transfer, version=3, stall_s=0.25, verified=w.NOT_VERIFIED
    )
    assert channel.engine.version == 3
    assert channel.applied.is_set()
    assert channel.member.stall_s == 0.25
    assert channel.member.update_s is not None
    assert 0 < channel.member.update_s < DEADLINE_S


async def test_an_engine_that_agrees_with_the_probe_is_verified(channel: Channel) -> None:
    channel.engine.logprobs = [-1.0, -2.00003]
    applied = await channel.asked(await channel.brought(1, probe=PROBE))
    assert applied.verified == w.BY_PROBE
    assert applied.deviation == pytest.approx(1e-5)
    assert channel.engine.given_up == []


@pytest.mark.parametrize("scores", [[-1.0, -2.1], [-1.0, float("nan")], [-1.0]])
async def test_engine_that_disagrees_with_probe_fails(channel: Channel, scores: list[float]) -> None:
    channel.engine.logprobs = scores
    failed = await channel.asked(await channel.brought(1, probe=PROBE))
    assert isinstance(failed, w.Failed)
    assert "does not hold version 1" in failed.detail
    assert channel.engine.given_up == [failed.detail]


async def test_an_engine_that_refuses_the_probe_is_given_up(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(token_ids: Sequence[int]) -> list[float]:
        raise RequestRefused("nan is no JSON")

    monkeypatch.setattr(channel.engine, "score", refuse)
    failed = await channel.asked(await channel.brought(1, probe=PROBE))
    assert "nan is no JSON" in failed.detail
    assert channel.engine.given_up == [failed.detail]


async def test_engine_with_checksums_is_verified_by_them(channel: Channel) -> None:
    announce = channel.announcement(1)
    (right,) = announce.manifest.checksums
    channel.engine.held = {"weight": right}
    assert (await channel.asked(await channel.brought(1))).verified == w.BY_CHECKSUM
    channel.engine.held = {"weight": right + 1}
    failed = await channel.asked(await channel.brought(1))
    assert "checksum of weight differs" in failed.detail
    assert channel.engine.given_up == [failed.detail]


async def test_a_version_that_arrives_damaged_is_refused(channel: Channel) -> None:
    announce = channel.announcement(1)
    damaged = msgspec.structs.replace(announce, manifest=msgspec.structs.replace(announce.manifest, checksums=[1]))
    await channel.asked(damaged)
    failed = await channel.hears(w.Loaded, w.Failed)
    damage = "version 1 arrived damaged: checksum of weight differs"
    assert failed == w.Failed(transfer=announce.transfer, stage="announce", detail=damage, gone=True)
    assert channel.engine.installed == []


async def test_a_version_of_another_transfer_group_is_refused(channel: Channel) -> None:
    announce = msgspec.structs.replace(channel.announcement(1), transport="gloo", source=None, epoch=8)
    failed = await channel.asked(announce)
    assert failed == w.Failed(transfer=announce.transfer, stage="announce", detail="in transfer group None, not in 8")


async def test_memory_of_gone_learner_is_released(channel: Channel) -> None:
    def mapped() -> bool:
        return channel.segment.path.name in Path("/proc/self/maps").read_text()

    await channel.brought(3)
    assert mapped()
    channel.learner.close(linger=0)
    async with asyncio.timeout(DEADLINE_S):
        while mapped():
            await asyncio.sleep(0)


async def test_a_transport_that_the_server_does_not_have_is_refused(channel: Channel) -> None:
    failed = await channel.asked(msgspec.structs.replace(channel.announcement(1), transport="pigeon"))
    assert "transport pigeon is not among" in failed.detail


@pytest.mark.parametrize("question", [w.Apply, w.Sending])
async def test_unannounced_version_is_refused(channel: Channel, question: type) -> None:
    apply = await channel.brought(3)
    for transfer, version in ((apply.transfer, 4), (apply.transfer + 100, 3)):
        failed = await channel.asked(question(transfer=transfer, version=version))
        assert isinstance(failed, w.Failed)
        assert f"version {version} was not announced in transfer {transfer}" in failed.detail
        apply = await channel.brought(3)
    assert channel.engine.version == 0


async def test_a_version_is_applied_once(channel: Channel) -> None:
    apply = await channel.brought(3)
    await channel.asked(apply)
    assert isinstance(await channel.asked(apply), w.Failed)
    assert len(channel.engine.installed) == 1


async def test_failed_update_is_reported_and_next_succeeds(channel: Channel) -> None:
    apply = await channel.brought(3)
    channel.engine.failure = UpdateFailed("no room")
    assert await channel.asked(apply) == w.Failed(transfer=apply.transfer, stage="apply", detail="no room")
    channel.engine.failure = None
    assert not channel.applied.is_set()
    assert isinstance(await channel.asked(await channel.brought(3)), w.Applied)


async def test_engine_update_is_finished_despite_new_request(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    installing, asked, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    install = channel.engine.install

    async def slowly(version: int, manifest: w.Manifest, staging: Staging) -> float:
        installing.set()
        await go_on.wait()
        return await install(version, manifest, staging)

    def noted(frame: Any, kinds: Any) -> Any:
        message = decode(frame, kinds)
        if isinstance(message, w.Sending):
            asked.set()
        return message

    monkeypatch.setattr(channel.engine, "install", slowly)
    monkeypatch.setattr("slipstream.rollout_servers.weights.follower.decode", noted)
    apply = await channel.brought(1)
    await channel.told(apply)
    async with asyncio.timeout(DEADLINE_S):
        await installing.wait()
        await channel.told(w.Sending(transfer=apply.transfer, version=2))
        await asked.wait()
    go_on.set()
    assert isinstance(await channel.hears(w.Applied, w.Failed), w.Applied)
    assert (await channel.hears(w.Applied, w.Failed)).stage == "sending"
    assert channel.engine.version == 1


async def test_garbage_is_dropped(channel: Channel) -> None:
    await channel.learner.send_multipart([b"server-1", b"\xff garbage"])
    await channel.brought(1)


async def test_evaluated_version_stays_until_evaluation_is_done(channel: Channel) -> None:
    await channel.asked(await channel.brought(1, evaluate=True))
    await channel.told(await channel.brought(2))
    await channel.join()
    assert channel.engine.version == 1
    channel.member.hold.drained(1)
    assert (await channel.hears(w.Applied)).version == 2


async def test_heartbeat_reports_the_hold_before_the_update(channel: Channel) -> None:
    apply = await channel.brought(1, evaluate=True)
    await channel.told(apply)
    joins = list[bool]()
    while not isinstance(answer := await channel.hears(w.Join, w.Applied), w.Applied):
        joins.append(answer.holding)
    assert joins[-1]
    channel.member.hold.drained(1)
    while (await channel.join()).holding:
        pass
    channel.member.hold.hold(2)
    channel.engine.ready = False
    while (await channel.join()).holding:  # an engine that was started anew can't finish an evaluation
        pass


async def test_server_that_holds_gets_the_latest_version_afterwards(tmp_path: Path, hold: EvaluationHold) -> None:
    engine = LastingEngine()
    async with learning(tmp_path, engine, hold, transport="stream") as learner:
        hold.hold(0)
        await asyncio.to_thread(wait_until, lambda: all(member.holding for member in learner.publisher._roster))
        for version in (1, 2, 3):
            await asyncio.to_thread(learner.publish, version)  # returns: training goes on
        assert engine.installed == []
        hold.drained(0)
        await asyncio.to_thread(learner.wait)
        assert (engine.version, len(engine.installed), learner.publisher.metrics.evictions) == (3, 1, 0)


async def test_a_new_announcement_ends_the_wait_for_an_evaluation(channel: Channel) -> None:
    await channel.asked(await channel.brought(1, evaluate=True))
    await channel.told(await channel.brought(2))
    apply = await channel.brought(3)  # the learner gave version 2 up
    channel.member.hold.drained(1)
    assert (await channel.asked(apply)).version == 3
    assert len(channel.engine.installed) == 2


async def test_the_death_of_the_engine_ends_the_member(channel: Channel) -> None:
    apply = await channel.brought(1)
    channel.engine.failure = EngineError("vLLM died")
    await channel.told(apply)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.wait([channel.running])
    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match="vLLM died")):
        channel.running.result()


async def test_a_server_that_is_stopped_says_that_it_leaves(channel: Channel) -> None:
    channel.running.cancel()
    assert await channel.hears(w.Leave) == w.Leave()


# --- versions that go straight into the engine, as a rollout server's side of the weight channel sees them ------------


async def test_group_of_unknown_transport_is_refused(channel: Channel) -> None:
    await channel.join()
    form = w.Form(
        transfer=3, epoch=8, transport="pigeon", host="127.0.0.1", port=1, rank=1, world=2, deadline_s=DEADLINE_S
    )
    failed = await channel.asked(form)
    assert (type(failed), failed.transfer, failed.stage) == (w.Failed, 3, "form")
    assert isinstance(await channel.asked(await channel.brought(1)), w.Applied)


@pytest.mark.parametrize("change", [{"ready": False}, {"incarnation": "second"}], ids=["died", "started-anew"])
async def test_version_is_refused_when_engine_of_group_is_gone(channel: Channel, change: dict[str, Any]) -> None:
    await channel.entered()
    announce = channel.direct(1)
    assert isinstance(await channel.asked(announce), w.Ready)
    for name, value in change.items():
        setattr(channel.engine, name, value)
    assert isinstance(await channel.asked(announce), w.Failed)
    joins = [await channel.join() for _ in range(2)]  # one may have been on its way
    assert ("nccl" in joins[-1].transports) == channel.engine.ready


async def test_direct_version_waits_for_evaluation_before_first_byte(channel: Channel) -> None:
    await channel.asked(await channel.brought(1, evaluate=True))
    await channel.entered()
    announce = channel.direct(2)
    await channel.told(announce)
    for _ in range(2):  # one may have been on its way
        assert isinstance(await channel.hears(w.Join, w.Ready), w.Join)
    channel.member.hold.drained(1)
    assert await channel.hears(w.Ready) == w.Ready(transfer=announce.transfer, version=2)
    channel.member.hold.hold(1)  # whatever comes now, generation stands still
    sending = w.Sending(transfer=announce.transfer, version=2)
    assert isinstance(await channel.asked(sending), w.Loaded)
    assert isinstance(await channel.asked(w.Apply(transfer=announce.transfer, version=2)), w.Applied)
    assert channel.engine.given_up == []


@pytest.mark.parametrize("then", ["evicted", "another group", "another version", "nothing"])
async def test_engine_with_partial_version_fails_when_not_applied(channel: Channel, then: str) -> None:
    await channel.entered()
    apply = await channel.sent(channel.direct(1, deadline_s=0.1 if then == "nothing" else DEADLINE_S))
    match then:
        case "evicted":
            await channel.told(w.Evicted(reason="silent", retry_s=1.0))
        case "another group":
            await channel.entered()
        case "another version":
            assert isinstance(await channel.asked(w.Apply(transfer=apply.transfer, version=2)), w.Failed)
    async with asyncio.timeout(DEADLINE_S):
        await channel.engine.failed.wait()
    assert len(channel.engine.given_up) == 1


async def test_engine_with_partial_version_fails_without_learner(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiving, gone = asyncio.Event(), asyncio.Event()

    async def install(version: int, manifest: w.Manifest, source: DirectSource) -> None:
        receiving.set()
        await gone.wait()
        await source.approval()

    await channel.entered()
    monkeypatch.setattr(channel.engine, "install", install)
    announce = channel.direct(1, deadline_s=0.1)
    assert isinstance(await channel.asked(announce), w.Ready)
    await channel.told(w.Sending(transfer=announce.transfer, version=1))
    async with asyncio.timeout(DEADLINE_S):
        await receiving.wait()
        channel.learner.close(linger=0)
        while await channel.member._socket.poll(0, zmq.POLLOUT):  # type: ignore[call-arg]  # annotated without
            await asyncio.sleep(0.01)
        gone.set()
        await channel.engine.failed.wait()
    assert len(channel.engine.given_up) == 1
