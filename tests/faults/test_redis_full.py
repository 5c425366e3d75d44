"""Redis without memory or disk space: producers wait, no group is lost, the run continues afterwards."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest
import structlog
from redis.asyncio import Redis

from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import group_key
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, encode
from slipstream.configs import RunConfig
from slipstream.rollout_servers.concurrency import ConcurrencyLimiter
from tests.buffer.groups import LONG, answered
from tests.buffer.peers import Peer, announced, connected, serving, until
from tests.faults.accounting import assert_accounted_for
from tests.faults.own_redis import OwnRedis
from tests.faults.scripted_run import REWARD, STEPS, scripted_run

ROOM_BYTES = 200_000
"""Room for dozens of groups."""
FAR_AHEAD = 500
"""Versions: far more groups than the room holds."""
DEADLINE_S = 90.0

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("short_retries")]


async def test_full_memory_pauses_producers(
    own_config: RunConfig, own_redis: OwnRedis, own_client: Redis, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.store.redis.LOG_EVERY_S", 0.1)
    monkeypatch.setattr("slipstream.buffer.service.SWEEP_S", 0.1)  # each sweep removes finished groups
    config = own_config.model_copy(update={"buffer": far_ahead(own_config)})
    ledger = Ledger(own_client, config)
    with structlog.testing.capture_logs() as logs:
        async with scripted_run(config, model) as learner, asyncio.timeout(DEADLINE_S):

            async def some_are_ready() -> bool:
                return (await ledger.counts()).ready >= 2 * config.learner.groups_per_step

            await until(some_are_ready)
            own_redis.limit_memory(own_redis.used_bytes() + ROOM_BYTES)
            await until(logged(logs, "Redis is full", times=5))
            assert (await ledger.counts()).issued < FAR_AHEAD * config.learner.groups_per_step, "memory is the limit"
            await until(logged(logs, "Redis is full", times=10))
            # At the brink of the limit a delivery may still fit; groups that don't fit hold back as many tickets.
            assert (await ledger.counts()).in_flight <= ConcurrencyLimiter.of(config.rollout).limit
            await asyncio.to_thread(learner.run)
    assert own_redis.evicted() == 0
    assert await ledger.verify() == []
    assert (await ledger.counts()).trained == STEPS * config.learner.groups_per_step
    trained = [group_id for ids in learner.trained.values() for group_id in ids]
    assert len(set(trained)) == len(trained) == STEPS * config.learner.groups_per_step


def far_ahead(config: RunConfig) -> object:
    """Settings of the buffer without a staleness limit and with immediate retention."""
    retention = config.buffer.retention.model_copy(update={"max_groups": 0})
    return config.buffer.model_copy(update={"retention": retention, "max_staleness": FAR_AHEAD})


def logged(logs: Sequence[Mapping[str, object]], event: str, *, times: int) -> Callable[[], Awaitable[bool]]:
    """Whether an event was logged that many times."""

    async def enough() -> bool:
        return sum(str(line["event"]).startswith(event) for line in logs) >= times

    return enough


async def test_full_redis_acknowledges_only_stored_groups(
    own_config: RunConfig, own_redis: OwnRedis, own_client: Redis
) -> None:
    async with serving(own_config), connected(own_config) as server:
        await server.join(credits=60)
        tickets = await server.tickets()
        own_redis.limit_memory(own_redis.used_bytes() + ROOM_BYTES)
        acknowledged = [ticket.id for ticket in tickets if await delivered(server, ticket)]
        assert 0 < len(acknowledged) < len(tickets)
        stored = [bool(await own_client.exists(group_key(own_config.run.name, ticket.id))) for ticket in tickets]
        assert [ticket.id for ticket, there in zip(tickets, stored, strict=True) if there] == acknowledged
        own_redis.limit_memory(0)
        assert [await delivered(server, ticket) for ticket in tickets] == [True] * len(tickets)
    ledger = Ledger(own_client, own_config)
    assert await ledger.verify() == []
    assert (await ledger.counts()).ready == len(tickets)


async def delivered(server: Peer, ticket: m.Ticket) -> bool:
    """Delivers a large group; whether it was acknowledged before the reply to a later request."""
    group = answered(ticket)
    for trajectory in group.trajectories:
        trajectory.scores.update({REWARD: 1.0} | {f"{number:0{LONG}}": 1.0 for number in range(10)})
    await server.send(announced(group), encode(group))
    await server.send(m.StateRequest(request=1))
    acknowledged = False
    while True:
        answer = decode(await asyncio.wait_for(server.socket.recv(), DEADLINE_S), m.ToServer | m.ToLearner)
        if isinstance(answer, m.State):
            return acknowledged
        acknowledged |= isinstance(answer, m.Acknowledge) and ticket.id in answer.outcomes


async def test_full_disk_pauses_run(own_config: RunConfig, own_redis: OwnRedis, own_client: Redis, model: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with scripted_run(own_config, model) as learner, asyncio.timeout(DEADLINE_S):
            training = asyncio.create_task(asyncio.to_thread(learner.run))

            async def started() -> bool:
                return learner.step >= 10

            await until(started)
            own_redis.fill_disk()
            await until(logged(logs, "waiting for Redis", times=1))
            reached = learner.step
            assert reached < STEPS
            own_redis.make_room_on_disk()
            await training
    assert any("AOF" in str(line.get("error")) for line in logs)
    history = await assert_accounted_for(own_client, own_config, steps=STEPS)
    assert history == learner.trained
    # The file has the same content as the memory.
    own_redis.kill()
    own_redis.start()
    await own_client.connection_pool.disconnect()
    assert await assert_accounted_for(own_client, own_config, steps=STEPS) == history
