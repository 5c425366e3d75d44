"""Versions that go straight into the engine, as a rollout server's side of the weight channel sees them."""

import asyncio
from typing import Any

import pytest
import zmq

from slipstream.buffer.wire.weights import protocol as w
from slipstream.rollout_servers.engines.base import DirectSource
from tests.rollout_servers.weights.channel import DEADLINE_S, Channel


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


async def test_direct_version_waits_for_evaluation_before_first_byte(
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
