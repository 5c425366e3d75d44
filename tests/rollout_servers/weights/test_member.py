"""A rollout server's side of the weight channel, against a learner driven by hand."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq.asyncio

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire import weights as w
from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.segments import Segment, host_identity
from slipstream.buffer.wire.sockets import bind_router
from slipstream.configs import RunConfig
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.build import build_transports
from slipstream.learner.weights.transports.shm import ShmTransport
from slipstream.rollout_servers.engines.base import EngineError, RequestRefused, UpdateFailed
from slipstream.rollout_servers.weights.hold import EvaluationHold
from slipstream.rollout_servers.weights.member import WeightMember
from tests.conftest import free_port
from tests.ipv6 import needs_ipv6
from tests.learner.weights.learner import Learner, gathered
from tests.rollout_servers.scripted import LastingEngine

DEADLINE_S = 60.0
NEVER_S = 1000.0
PROBE = w.Probe(token_ids=[1, 2, 3], logprobs=[-1.0, -2.0])


class Direct:
    """A way into an engine that can enter groups."""

    transport = "nccl"
    workers = 1

    async def join(self, group: w.Form) -> None:
        """Enters at once."""

    async def begin(self, manifest: w.Manifest) -> None:
        """Begins at once."""

    async def loaded(self, manifest: w.Manifest) -> None:
        """Has it at once."""

    async def finish(self, manifest: w.Manifest) -> float:
        """Has it at once."""
        return 0.0


@dataclass
class Channel:
    """A member that runs, and the learner's end of its channel."""

    member: WeightMember
    engine: LastingEngine
    learner: zmq.asyncio.Socket
    running: "asyncio.Task[None]"
    applied: asyncio.Event
    segment: Segment
    transfers: int = 0

    async def join(self) -> w.Join:
        """The next heartbeat."""
        join: w.Join = await self.hears(w.Join)
        return join

    async def told(self, message: m.Message) -> None:
        await self.learner.send_multipart([b"server-1", encode(message)])

    async def asked(self, message: m.Message) -> Any:
        """The answer to a message."""
        await self.told(message)
        return await self.hears(w.Entered, w.Ready, w.Loaded, w.Applied, w.Failed)

    async def hears(self, *kinds: type) -> Any:
        """The next message of one of these kinds."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                peer, frame = await self.learner.recv_multipart()
                assert peer == b"server-1"
                message = decode(frame, w.FromServer)
                if isinstance(message, kinds):
                    return message

    def announcement(self, version: int, *, evaluate: bool = False, probe: w.Probe | None = None) -> w.Announce:
        """A version of four numbers, in shared memory."""
        tensors = [w.TensorInfo(name="weight", dtype="float32", shape=[4])]
        data = torch.from_file(str(self.segment.path), shared=True, size=16, dtype=torch.uint8)
        data.view(torch.float32).fill_(float(version))
        manifest = w.Manifest(version=version, tensors=tensors, bucket_bytes=16, evaluate=evaluate, probe=probe)
        snapshot = Snapshot(manifest, data, self.segment.path).sealed()
        self.transfers += 1
        return w.Announce(
            transfer=self.transfers,
            transport="shm",
            manifest=snapshot.manifest,
            deadline_s=DEADLINE_S,
            source=ShmTransport().source(snapshot, -1),
        )

    async def entered(self) -> None:
        """A transfer group whose versions go straight into the engine."""
        self.engine.direct = Direct()
        form = w.Form(
            transfer=0, epoch=8, transport="nccl", host="127.0.0.1", port=1, rank=1, world=2, deadline_s=DEADLINE_S
        )
        assert isinstance(await self.asked(form), w.Entered)

    def direct(self, version: int, *, deadline_s: float = DEADLINE_S) -> w.Announce:
        """A version that goes straight into the engine."""
        announce = self.announcement(version)
        return msgspec.structs.replace(announce, transport="nccl", source=None, epoch=8, deadline_s=deadline_s)

    async def sent(self, announce: w.Announce) -> w.Apply:
        """Lets a version go straight into the engine; returns what is to be asked next."""
        transfer, version = announce.transfer, announce.manifest.version
        assert await self.asked(announce) == w.Ready(transfer=transfer, version=version)
        sending = w.Sending(transfer=transfer, version=version)
        assert await self.asked(sending) == w.Loaded(transfer=transfer, version=version)
        return w.Apply(transfer=transfer, version=version)

    async def brought(self, version: int, **options: Any) -> w.Apply:
        """Announces a version and waits until it is loaded; returns what is to be asked next."""
        announce = self.announcement(version, **options)
        assert await self.asked(announce) == w.Ready(transfer=announce.transfer, version=version)
        assert await self.hears(w.Loaded, w.Failed) == w.Loaded(transfer=announce.transfer, version=version)
        return w.Apply(transfer=announce.transfer, version=version)


def following(folder: Path) -> RunConfig:
    """The configuration of a run whose learner is on a free port."""
    return RunConfig.model_validate(
        {
            "run": {"name": f"members-{folder.name}"},
            "model": {"path": folder, "dtype": "float32"},
            "weights": {"control_port": free_port(), "deadline_s": 2 * NEVER_S},
            "eval": {"deadline_s": NEVER_S},
        }
    )


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[Channel]:
    config = following(tmp_path)
    context = zmq.asyncio.Context()
    learner = bind_router(context, f"tcp://127.0.0.1:{config.weights.control_port}", max_message_bytes=1 << 20)
    engine, applied = LastingEngine(), asyncio.Event()
    member = WeightMember(config, "server-1", engine, EvaluationHold(), on_applied=applied.set)
    running = asyncio.create_task(member.run(context))
    segment = Segment(config.run.name, 16)
    channel = Channel(member, engine, learner, running, applied, segment)
    await channel.join()  # now the learner can reach it
    yield channel
    running.cancel()
    await asyncio.wait([running])
    context.destroy(linger=0)
    segment.close()


async def test_heartbeats_say_who_it_is_what_it_holds_and_how_it_can_be_reached(channel: Channel) -> None:
    join = await channel.join()
    assert (join.server, join.incarnation, join.version, join.staged) == ("server-1", "first", 0, -1)
    assert join.host == host_identity()
    assert set(join.transports) == {"gloo", "shm", "file", "stream"}
    await channel.asked(await channel.brought(3))
    joins = [await channel.join() for _ in range(2)]  # one may have been on its way
    assert (joins[-1].version, joins[-1].staged) == (3, 3)


async def test_a_learner_that_comes_late_hears_of_the_server_as_it_is_then(tmp_path: Path) -> None:
    config, engine = following(tmp_path), LastingEngine()
    context = zmq.asyncio.Context()
    member = WeightMember(config, "server-1", engine, EvaluationHold(), on_applied=asyncio.Event().set)
    running = asyncio.create_task(member.run(context))
    for _ in range(10):  # now it would have told somebody
        await asyncio.sleep(0)
    engine.incarnation, engine.version = "second", 7
    with bind_router(context, f"tcp://127.0.0.1:{config.weights.control_port}", max_message_bytes=1 << 20) as learner:
        async with asyncio.timeout(DEADLINE_S):
            _, frame = await learner.recv_multipart()
    join = decode(frame, w.FromServer)
    assert isinstance(join, w.Join)
    assert (join.incarnation, join.version) == ("second", 7)
    running.cancel()
    await asyncio.wait([running])
    context.destroy(linger=0)


@needs_ipv6
@pytest.mark.parametrize("transport", ["stream", "gloo"])
@pytest.mark.parametrize("bind", ["::1", "::"])
async def test_control_and_weights_travel_over_ipv6(tmp_path: Path, transport: str, bind: str) -> None:
    ports = {port: free_port() for port in ("control_port", "store_port", "stream_port")}
    weights = {"host": "::1", "bind": bind, "transport": transport, "deadline_s": DEADLINE_S, **ports}
    config = RunConfig.model_validate(
        {"run": {"name": f"members-{tmp_path.name}"}, "model": {"path": tmp_path}, "weights": weights}
    )
    context, engine = zmq.asyncio.Context(), LastingEngine()
    member = WeightMember(config, "server-1", engine, EvaluationHold(), on_applied=lambda: None)
    running = asyncio.create_task(member.run(context))
    learner = Learner(config, WeightPublisher(config, build_transports(config)))
    await asyncio.to_thread(gathered, learner, "server-1")
    await asyncio.to_thread(learner.publish, 1)
    await asyncio.to_thread(learner.wait)
    assert (engine.version, learner.members()) == (1, {"server-1"})
    running.cancel()
    await asyncio.wait([running])
    await asyncio.to_thread(learner.close)
    context.destroy(linger=0)


async def test_a_version_is_received_when_announced_and_installed_when_it_is_to_be_applied(channel: Channel) -> None:
    apply = await channel.brought(3)
    assert channel.engine.version == 0
    assert await channel.asked(apply) == w.Applied(
        transfer=apply.transfer, version=3, stall_s=0.25, verified=w.NOT_VERIFIED
    )
    assert channel.engine.version == 3
    assert channel.applied.is_set()


async def test_an_engine_that_agrees_with_the_probe_is_verified(channel: Channel) -> None:
    channel.engine.logprobs = [-1.0, -2.00003]
    applied = await channel.asked(await channel.brought(1, probe=PROBE))
    assert applied.verified == w.BY_PROBE
    assert applied.deviation == pytest.approx(1e-5)
    assert channel.engine.given_up == []


@pytest.mark.parametrize("scores", [[-1.0, -2.1], [-1.0, float("nan")], [-1.0]])
async def test_an_engine_that_disagrees_with_the_probe_is_given_up_and_the_learner_hears_why(
    channel: Channel, scores: list[float]
) -> None:
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


async def test_an_engine_that_shows_its_tensors_is_verified_by_their_checksums(channel: Channel) -> None:
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


@pytest.mark.parametrize("change", [{"ready": False}, {"incarnation": "second"}], ids=["died", "started-anew"])
async def test_a_version_for_the_engine_that_entered_the_group_is_refused_when_it_is_not_there_any_more(
    channel: Channel, change: dict[str, Any]
) -> None:
    await channel.entered()
    announce = channel.direct(1)
    assert isinstance(await channel.asked(announce), w.Ready)
    for name, value in change.items():
        setattr(channel.engine, name, value)
    assert isinstance(await channel.asked(announce), w.Failed)
    joins = [await channel.join() for _ in range(2)]  # one may have been on its way
    assert ("nccl" in joins[-1].transports) == channel.engine.ready


async def test_the_memory_of_a_learner_that_is_gone_is_let_go_of(channel: Channel) -> None:
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
async def test_a_version_that_was_not_announced_is_neither_received_nor_applied(
    channel: Channel, question: type
) -> None:
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


async def test_an_update_that_fails_is_told_to_the_learner_and_the_next_one_may_succeed(channel: Channel) -> None:
    apply = await channel.brought(3)
    channel.engine.failure = UpdateFailed("no room")
    assert await channel.asked(apply) == w.Failed(transfer=apply.transfer, stage="apply", detail="no room")
    channel.engine.failure = None
    assert not channel.applied.is_set()
    assert isinstance(await channel.asked(await channel.brought(3)), w.Applied)


async def test_garbage_is_dropped(channel: Channel) -> None:
    await channel.learner.send_multipart([b"server-1", b"\xff garbage"])
    await channel.brought(1)


async def test_a_version_under_evaluation_stays_until_its_evaluation_is_done(channel: Channel) -> None:
    await channel.asked(await channel.brought(1, evaluate=True))
    await channel.told(await channel.brought(2))
    await channel.join()
    assert channel.engine.version == 1
    channel.member.hold.drained(1)
    assert (await channel.hears(w.Applied)).version == 2


async def test_a_new_announcement_ends_the_wait_for_an_evaluation(channel: Channel) -> None:
    await channel.asked(await channel.brought(1, evaluate=True))
    await channel.told(await channel.brought(2))
    apply = await channel.brought(3)  # the learner gave version 2 up
    channel.member.hold.drained(1)
    assert (await channel.asked(apply)).version == 3
    assert len(channel.engine.installed) == 2


async def test_a_version_that_stops_generation_from_the_first_byte_on_waits_for_the_evaluation_before_that(
    channel: Channel,
) -> None:
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
async def test_an_engine_that_holds_half_of_a_version_is_given_up_as_soon_as_that_is_not_to_be_applied(
    channel: Channel, then: str
) -> None:
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


async def test_a_server_that_is_stopped_while_the_learner_is_not_there_ends_all_the_same(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    member = WeightMember(following(tmp_path), "server-1", LastingEngine(), EvaluationHold(), on_applied=lambda: None)
    running = asyncio.create_task(member.run(context))
    async with asyncio.timeout(DEADLINE_S):
        while not hasattr(member, "_socket"):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
    assert running.cancelled()
    context.destroy(linger=0)
