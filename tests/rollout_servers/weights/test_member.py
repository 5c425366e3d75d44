"""A rollout server's side of the weight channel, against a learner driven by hand."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire import weights as w
from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.sockets import bind_router
from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.base import EngineError, UpdateFailed
from slipstream.rollout_servers.weights.hold import EvaluationHold
from slipstream.rollout_servers.weights.member import WeightMember
from tests.conftest import free_port
from tests.rollout_servers.scripted import ScriptedEngine

DEADLINE_S = 60.0
NEVER_S = 1000.0


def form(epoch: int) -> w.Form:
    return w.Form(epoch=epoch, transport="gloo", host="127.0.0.1", port=1, rank=1, world=2, deadline_s=1.0)


def manifest(version: int, *, evaluate: bool = False) -> w.Manifest:
    return w.Manifest(version=version, tensors=[], bucket_bytes=1 << 20, evaluate=evaluate)


def announce(epoch: int, version: int, *, evaluate: bool = False) -> w.Announce:
    return w.Announce(epoch=epoch, manifest=manifest(version, evaluate=evaluate))


@dataclass
class Channel:
    """A member that runs, and the learner's end of its channel."""

    member: WeightMember
    engine: ScriptedEngine
    learner: zmq.asyncio.Socket
    running: "asyncio.Task[None]"
    applied: asyncio.Event

    async def join(self) -> w.Join:
        """The next heartbeat."""
        join: w.Join = await self.hears(w.Join)
        return join

    async def told(self, message: m.Message) -> None:
        await self.learner.send_multipart([b"server-1", encode(message)])

    async def asked(self, message: m.Message) -> Any:
        """The answer to a message."""
        await self.told(message)
        return await self.hears(w.Ready, w.Applied, w.Failed)

    async def hears(self, *kinds: type) -> Any:
        """The next message of one of these kinds."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                peer, frame = await self.learner.recv_multipart()
                assert peer == b"server-1"
                message = decode(frame, w.FromServer)
                if isinstance(message, kinds):
                    return message


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[Channel]:
    port = free_port()
    config = RunConfig.model_validate(
        {
            "run": {"name": "members"},
            "model": {"path": tmp_path},
            "weights": {"control_port": port, "deadline_s": 2 * NEVER_S},
            "eval": {"deadline_s": NEVER_S},
        }
    )
    context = zmq.asyncio.Context()
    learner = bind_router(context, f"tcp://127.0.0.1:{port}", max_message_bytes=1 << 20)
    engine, applied = ScriptedEngine(workers=4), asyncio.Event()
    member = WeightMember(config, "server-1", engine, EvaluationHold(), on_applied=applied.set)
    running = asyncio.create_task(member.run(context))
    channel = Channel(member, engine, learner, running, applied)
    await channel.join()  # now the learner can reach it
    yield channel
    running.cancel()
    await asyncio.wait([running])
    context.destroy(linger=0)


async def test_heartbeats_say_who_it_is_which_group_it_is_in_and_what_it_serves(channel: Channel) -> None:
    assert await channel.join() == w.Join(run="members", server="server-1", epoch=-1, version=0, workers=4)
    await channel.told(form(7))
    assert await channel.asked(announce(7, 1)) == w.Ready(version=1)
    await channel.asked(w.Sent(version=1))
    joins = [await channel.join() for _ in range(2)]  # one may have been on its way
    assert joins[-1] == w.Join(run="members", server="server-1", epoch=7, version=1, workers=4)


async def test_a_version_is_received_when_announced_and_applied_when_sent(channel: Channel) -> None:
    await channel.told(form(7))
    assert await channel.asked(announce(7, 3)) == w.Ready(version=3)
    assert channel.engine.asked == [form(7), manifest(3)]
    assert await channel.asked(w.Sent(version=3)) == w.Applied(version=3, stall_s=0.25)
    assert channel.engine.asked[2:] == ["apply"]
    assert channel.applied.is_set()
    assert (channel.member.stalls.updates, channel.member.stalls.total_s) == (1, 0.25)


async def test_a_version_of_another_transfer_group_is_refused(channel: Channel) -> None:
    await channel.told(form(7))
    assert await channel.asked(announce(8, 1)) == w.Failed(stage="announce", detail="in epoch 7, not in 8")
    assert channel.engine.asked == [form(7)]


@pytest.mark.parametrize("announced", [None, 3])
async def test_the_end_of_a_version_that_was_not_announced_is_refused(channel: Channel, announced: int | None) -> None:
    await channel.told(form(7))
    if announced is not None:
        await channel.asked(announce(7, announced))
    assert await channel.asked(w.Sent(version=4)) == w.Failed(stage="sent", detail="version 4 was not announced")
    assert "apply" not in channel.engine.asked


async def test_a_version_is_applied_once(channel: Channel) -> None:
    await channel.told(form(7))
    await channel.asked(announce(7, 3))
    await channel.asked(w.Sent(version=3))
    assert isinstance(await channel.asked(w.Sent(version=3)), w.Failed)
    assert channel.engine.asked.count("apply") == 1


async def test_a_transfer_that_fails_is_told_to_the_learner_and_the_next_one_may_succeed(channel: Channel) -> None:
    await channel.told(form(7))
    await channel.asked(announce(7, 3))
    channel.engine.failure = UpdateFailed("the last bucket never came")
    assert await channel.asked(w.Sent(version=3)) == w.Failed(stage="sent", detail="the last bucket never came")
    channel.engine.failure = None
    assert isinstance(await channel.asked(w.Sent(version=3)), w.Failed)
    assert not channel.applied.is_set()
    await channel.told(form(8))
    await channel.asked(announce(8, 3))
    assert await channel.asked(w.Sent(version=3)) == w.Applied(version=3, stall_s=0.25)


async def test_garbage_is_dropped(channel: Channel) -> None:
    await channel.learner.send_multipart([b"server-1", b"\xff garbage"])
    await channel.told(form(7))
    assert await channel.asked(announce(7, 1)) == w.Ready(version=1)


async def test_a_version_under_evaluation_stays_until_its_evaluation_is_done(channel: Channel) -> None:
    await channel.told(form(7))
    await channel.asked(announce(7, 1, evaluate=True))
    await channel.asked(w.Sent(version=1))
    await channel.asked(announce(7, 2))
    await channel.told(w.Sent(version=2))
    await channel.join()
    assert channel.engine.version == 1
    channel.member.hold.drained(1)
    assert await channel.hears(w.Applied) == w.Applied(version=2, stall_s=0.25)


async def test_the_death_of_the_engine_ends_the_member(channel: Channel) -> None:
    channel.engine.failure = EngineError("vLLM died")
    await channel.told(form(7))
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.wait([channel.running])
    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match="vLLM died")):
        channel.running.result()
