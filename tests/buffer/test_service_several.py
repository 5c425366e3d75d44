"""Several services on one run: they hold nothing, so any of them does for any of the others' peers."""

import asyncio

import pytest
from redis.exceptions import OutOfMemoryError

from slipstream.buffer.service import BufferService
from slipstream.buffer.store.shard import RedisStore
from slipstream.buffer.store.types import Issued
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from tests.buffer.conftest import MakeConfig
from tests.buffer.groups import answered
from tests.buffer.peers import Peer, connected, learner, serving
from tests.conftest import free_port


def elsewhere(config: RunConfig) -> RunConfig:
    """The same run, served at another address."""
    address = f"tcp://127.0.0.1:{free_port()}"
    buffer = config.buffer.model_copy(update={"bind": address, "endpoint": address})
    return config.model_copy(update={"buffer": buffer})


async def work(server: Peer, *, credits: int) -> list[str]:
    """Joins, and delivers a group for each ticket; their ids."""
    await server.join(credits=credits)
    tickets = await server.tickets()
    await server.credits(0, held=[ticket.id for ticket in tickets])
    ids = [ticket.id for ticket in tickets]
    assert await server.deliver(*(answered(ticket) for ticket in tickets)) == dict.fromkeys(ids, "ready")
    return ids


async def test_a_learner_is_leased_the_groups_that_another_service_took_in(
    config: RunConfig, service: BufferService, server: Peer
) -> None:
    other = elsewhere(config)
    async with serving(other), connected(other, "r1") as far:
        ids = [*await work(server, credits=2), *await work(far, credits=2)]
        assert len(set(ids)) == 4, "no ticket twice"
    async with learner(config) as client:
        await asyncio.to_thread(client.hello, 0)
        lease = await asyncio.to_thread(client.lease, 0, count=4, consuming_version=0, wait_s=5.0)
        assert lease is not None
        assert sorted(lease.ids) == sorted(ids)
    assert await service.ledger.verify() == []


async def test_what_was_begun_with_one_service_goes_on_with_another(config: RunConfig) -> None:
    async with serving(config), connected(config) as server:
        await server.join(credits=1)
        (ticket,) = await server.tickets()
    other = elsewhere(config)
    async with serving(other) as service, connected(other) as server:
        await server.send(m.Deliver(ids=[ticket.id]), encode(answered(ticket)))
        await server.receive(m.WhoAreYou)
        await server.hello()
        await server.receive(m.Welcome)
        assert await server.deliver(answered(ticket)) == {ticket.id: "ready"}
        assert await service.ledger.verify() == []


async def test_servers_of_another_service_than_the_learners_evaluate(
    config: RunConfig, service: BufferService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.service.SWEEP_S", 0.01)
    other = elsewhere(config)
    async with serving(other), connected(other) as far, connected(other, "r1") as farther:
        for server in (far, farther):
            await server.join(version=1)
            await server.state()
        async with learner(config) as client:
            await asyncio.to_thread(client.published, 1, evaluate=True)
        (mine,), (theirs,) = await far.tickets(), await farther.tickets()
        assert sorted([*mine.indices, *theirs.indices]) == list(range(100))


async def test_shards_share_the_tasks_and_a_step_takes_its_part_of_each(make_config: MakeConfig) -> None:
    config = make_config(shards=2)
    async with serving(config) as service, connected(config) as server:
        ids = await work(server, credits=8)
        assert len(ids) == 8
        assert {int(id) % 2 for id in ids} == {0, 1}
        async with learner(config) as client:
            await asyncio.to_thread(client.hello, 0)
            lease = await asyncio.to_thread(client.lease, 0, count=4, consuming_version=0, wait_s=5.0)
            assert lease is not None
            assert sorted(int(id) % 2 for id in lease.ids) == [0, 0, 1, 1]
            counts = (await asyncio.to_thread(client.trained, 0)).counts
        assert (counts.issued, counts.ready, counts.trained) == (8, 4, 4)
        assert await service.ledger.verify() == []


async def test_tickets_of_one_shard_are_issued_although_another_one_has_no_room(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(self: RedisStore, *_: object, **__: object) -> Issued:
        assert self is second
        raise OutOfMemoryError("used memory > maxmemory")

    config = make_config(shards=2)
    async with serving(config) as service, connected(config) as server:
        second = service.ledger._shards[1]
        monkeypatch.setattr(second, "issue", full.__get__(second))
        ids = await work(server, credits=8)
        assert {int(id) % 2 for id in ids} == {0}
        assert (await service.ledger.counts()).issued == len(ids)


def test_servers_spread_over_the_services_and_stay_with_theirs(make_config: MakeConfig) -> None:
    buffer = make_config(more_endpoints=["tcp://b:1", "tcp://c:1"]).buffer
    chosen = [buffer.endpoint_for(f"server-{number}") for number in range(60)]
    assert {chosen.count(endpoint) >= 10 for endpoint in (buffer.endpoint, *buffer.more_endpoints)} == {True}
    assert chosen == [buffer.endpoint_for(f"server-{number}") for number in range(60)]
