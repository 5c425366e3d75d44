"""Spill files through killed services and servers: a learner that undoes its steps gets the same groups again."""

import asyncio
from collections.abc import Sequence

from redis.asyncio import Redis

from slipstream.buffer.client import GroupReader
from slipstream.buffer.service import BufferService
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from tests.buffer.groups import answered, large
from tests.buffer.peers import connected, learner, serving, until
from tests.faults.own_redis import OwnRedis
from tests.faults.scripted_run import REWARD

GROUPS = 4


async def test_spilled_groups_survive_service_and_redis(
    own_config: RunConfig, own_redis: OwnRedis, own_client: Redis
) -> None:
    async with serving(own_config) as service:
        groups = await trained(own_config)
        await until(lambda: is_spilled(service))
        assert await service.ledger.verify() == []
    own_redis.kill()
    own_redis.start()
    await own_client.connection_pool.disconnect()
    async with serving(own_config) as service:
        assert await is_spilled(service)
        assert await leased_again(own_config) == groups
        assert await service.ledger.verify() == []


async def test_groups_of_a_removed_folder_expire(own_config: RunConfig, own_redis: OwnRedis) -> None:
    async with serving(own_config) as service:
        await trained(own_config)
        await until(lambda: is_spilled(service))
        own_config.paths.spill.rename(own_config.paths.spill.with_name("moved"))
        assert await leased_again(own_config) is None
        assert (await service.ledger.counts()).reasons == {"expired:bytes_lost": GROUPS}
        assert await service.ledger.verify() == []


async def trained(config: RunConfig) -> list[m.Group]:
    """Delivers large groups and trains on them in step 0; a checkpoint contains it."""
    async with connected(config) as server, learner(config) as client:
        await server.join(credits=GROUPS)
        groups = [large(answered(ticket), reward=REWARD) for ticket in await server.tickets()]
        assert await server.deliver(*groups) == {group.id: "ready" for group in groups}
        await asyncio.to_thread(client.hello, 0)
        assert await asyncio.to_thread(client.lease, 0, count=GROUPS, consuming_version=0, wait_s=10.0)
        await asyncio.to_thread(client.trained, 0)
        await asyncio.to_thread(client.checkpointed, 1)
        return groups


async def leased_again(config: RunConfig) -> Sequence[m.Group] | None:
    """The groups that a learner gets after it has undone step 0."""
    async with learner(config) as client:
        await asyncio.to_thread(client.hello, 0, undo=True)
        lease = await asyncio.to_thread(client.lease, 0, count=GROUPS, consuming_version=0, wait_s=1.0)
        return None if lease is None else GroupReader(config.redis, run=config.run.name).read(lease.ids)


async def is_spilled(service: BufferService) -> bool:
    return (await service.ledger.counts()).spilled == GROUPS
