"""The run's learner: the latest hello counts, also after Redis has lost it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, closing

import pytest
import structlog
from redis.asyncio import Redis

from slipstream.buffer.cli import serve
from slipstream.buffer.client import BufferClient
from slipstream.buffer.service import BufferService
from slipstream.buffer.store.redis import run_prefix
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError, RefusedError
from tests.buffer.conftest import MakeConfig
from tests.buffer.groups import answered
from tests.buffer.peers import PATIENCE_S, Peer, connected, learner, serving, until
from tests.buffer.rollback import Moment

Call = Callable[[BufferClient], object]
CALLS: dict[str, Call] = {
    "lease": lambda client: client.lease(0, count=4, consuming_version=0, wait_s=60.0),
    "trained": lambda client: client.trained(0), "published": lambda client: client.published(1, evaluate=False),
    "throttle": lambda client: client.throttle(0), "checkpointed": lambda client: client.checkpointed(1),
    "hello": lambda client: client.hello(0), "finish": lambda client: client.finish(),
}  # fmt: skip


@pytest.fixture
async def learners(config: RunConfig, service: BufferService) -> AsyncIterator[tuple[BufferClient, BufferClient]]:
    """Two clients; the second sent its hello after the first."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(closing(BufferClient(config, "learner"))) for _ in range(2))
        for client in (first, second):
            await asyncio.to_thread(client.hello, 0)
        yield first, second


async def test_nothing_is_issued_while_learner_is_away(
    server: Peer, config: RunConfig, service: BufferService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.handlers.learner.PROBE_AFTER_S", 0.0)
    monkeypatch.setattr("slipstream.buffer.service.SWEEP_S", 0.01)

    async def paused() -> bool:
        return service.fleet.paused

    async with learner(config) as client:
        await asyncio.to_thread(client.hello, 0)
        await server.join(credits=1)
        (ticket,) = await server.tickets()
        assert not await paused()
    await until(paused)
    await server.credits(4, held=[ticket.id])
    await until(lambda: recorded(service, capacity=4))
    await service.fleet.grant()
    assert (await service.ledger.counts()).issued == 1
    async with learner(config) as client:
        await asyncio.to_thread(client.hello, 0)
        assert len(await server.tickets()) == 3


async def recorded(service: BufferService, *, capacity: int) -> bool:
    """Whether the server's report of its credits has arrived."""
    return [each.credits.capacity for each in service.fleet.servers.values() if each.credits] == [capacity]


async def supply(server: Peer, groups: int) -> list[str]:
    """Delivers that many groups; their ids."""
    await server.join(credits=groups)
    tickets = await server.tickets()
    await server.credits(0)
    assert len(tickets) == groups
    await server.deliver(*(answered(ticket) for ticket in tickets))
    return [ticket.id for ticket in tickets]


async def test_lease_request_of_dead_learner_is_ignored(server: Peer, config: RunConfig) -> None:
    await server.join(credits=2)
    groups = [answered(ticket) for ticket in await server.tickets()]
    async with connected(config, "dead") as dead:
        await dead.lead()
        await dead.send(m.LeaseRequest(request=1, incarnation="a1", step=7, count=2, consuming_version=0, wait_s=60.0))
        await dead.state()
    async with learner(config) as client:
        await asyncio.to_thread(client.hello, 0)
        await server.deliver(*groups)
        counts = (await asyncio.to_thread(client.state)).counts
    assert (counts.ready, counts.leased) == (2, 0)


async def test_superseded_learner_is_refused(
    learners: tuple[BufferClient, BufferClient], server: Peer, service: BufferService, config: RunConfig
) -> None:
    first, second = learners
    ids = await supply(server, 4)
    lease = await asyncio.to_thread(second.lease, 0, count=4, consuming_version=0, wait_s=10.0)
    assert lease is not None
    assert lease.ids == ids
    before = await service.ledger.snapshot()
    for name, call in CALLS.items():
        with pytest.raises(RefusedError, match=f"taken over.*{config.run.name}"):
            await asyncio.to_thread(call, first)
        assert await service.ledger.snapshot() == before, name
    assert (await asyncio.to_thread(second.trained, 0)).counts.trained == 4


async def test_reconnected_learner_does_not_take_over(
    learners: tuple[BufferClient, BufferClient], server: Peer, config: RunConfig
) -> None:
    first, second = learners
    first._socket.disconnect(config.buffer.endpoint)
    first._socket.connect(config.buffer.endpoint)
    await asyncio.to_thread(first.state)
    ids = await supply(server, 4)
    lease = await asyncio.to_thread(second.lease, 0, count=4, consuming_version=0, wait_s=10.0)
    assert lease is not None
    assert lease.ids == ids
    await asyncio.to_thread(first.state)
    assert (await asyncio.to_thread(second.trained, 0)).counts.trained == 4


async def test_lost_hello_is_repeated_with_state(
    config: RunConfig, service: BufferService, server: Peer, redis: Redis
) -> None:
    await supply(server, 4)
    with closing(BufferClient(config, "learner")) as client, structlog.testing.capture_logs() as logs:
        before = await Moment.of(redis, config.run.name)
        await asyncio.to_thread(client.hello, 0)
        assert await asyncio.to_thread(client.lease, 0, count=4, consuming_version=0, wait_s=10.0)
        await asyncio.to_thread(client.throttle, 0)
        await asyncio.to_thread(client.trained, 0)
        await asyncio.to_thread(client.published, 1, evaluate=False)
        await before.return_to()
        state = await asyncio.to_thread(client.checkpointed, 1)
    assert (state.version, state.counts.ready, state.counts.leased) == (1, 4, 0)
    meta = await redis.hgetall(f"{run_prefix(config.run.name)}:meta")
    assert (meta[b"next_step"], meta[b"throttle"]) == (b"1", b"0")
    assert [line["step"] for line in logs if line["event"].startswith("the buffer has forgotten this learner")] == [1]


async def test_restarted_buffer_keeps_lease(make_config: MakeConfig) -> None:
    config = make_config()
    with closing(BufferClient(config, "learner")) as client:
        async with serving(config), connected(config) as server:
            await asyncio.to_thread(client.hello, 0)
            await supply(server, 4)
            assert await asyncio.to_thread(client.lease, 0, count=4, consuming_version=0, wait_s=10.0)
        async with serving(config):
            counts = (await asyncio.to_thread(client.trained, 0)).counts
    assert (counts.trained, counts.ready, counts.leased) == (4, 0, 0)


async def test_restarted_buffer_must_match_learner(make_config: MakeConfig) -> None:
    config = make_config()
    other = config.model_copy(update={"buffer": config.buffer.model_copy(update={"max_staleness": 7})})
    with closing(BufferClient(config, "learner")) as client:
        async with serving(config):
            await asyncio.to_thread(client.hello, 0)
        asking = asyncio.create_task(asyncio.to_thread(client.throttle, 0))
        with pytest.raises(ConfigError, match=r"buffer.max_staleness.*1.*7"):
            async with asyncio.timeout(PATIENCE_S):
                await serve(other)
        async with serving(config):
            await asking


async def test_waiting_learner_restores_lost_state(make_config: MakeConfig, redis: Redis) -> None:
    config = make_config(max_staleness=0)
    async with serving(config) as service, connected(config) as server:
        await supply(server, 4)
        with closing(BufferClient(config, "learner")) as client:
            await asyncio.to_thread(client.hello, 0)
            await asyncio.to_thread(client.published, 0, evaluate=False)
            assert await asyncio.to_thread(client.lease, 0, count=4, consuming_version=0, wait_s=10.0)
            before = await Moment.of(redis, config.run.name)
            await asyncio.to_thread(client.trained, 0)
            await asyncio.to_thread(client.published, 1, evaluate=False)
            await before.return_to()
            await server.credits(8, version=1)
            assert (await server.state()).counts.in_flight == 0
            await asyncio.to_thread(client.repeat_reports)
            assert len(await server.tickets()) == 4
        assert (await service.ledger.counts()).trained == 4
        assert await service.ledger.verify() == []


async def train_steps(server: Peer, client: BufferClient, steps: range) -> None:
    """Trains steps of four groups each and publishes after each."""
    for step in steps:
        await server.credits(4, version=step)
        await server.deliver(*[answered(ticket) for ticket in await server.tickets()])
        await server.credits(0, version=step)
        assert await asyncio.to_thread(client.lease, step, count=4, consuming_version=step, wait_s=10.0)
        await asyncio.to_thread(client.trained, step)
        await asyncio.to_thread(client.published, step + 1, evaluate=False)


async def test_learner_without_durable_steps_is_refused(
    server: Peer, service: BufferService, config: RunConfig
) -> None:
    await server.join()
    async with learner(config) as first, learner(config) as other:
        await asyncio.to_thread(first.hello, 0)
        await train_steps(server, first, range(3))
        await asyncio.to_thread(first.checkpointed, 2)
        before = await service.ledger.snapshot()
        for step in (0, 1):
            with pytest.raises(RefusedError, match=r"2 steps.*run\.dir.*--undo-steps"):
                await asyncio.to_thread(other.hello, step)
        assert await service.ledger.snapshot() == before
        await train_steps(server, first, range(3, 4))
        await asyncio.to_thread(first.hello, 0)  # its own repeated hello
    async with learner(config) as restarted:
        assert (await asyncio.to_thread(restarted.hello, 2)).counts.ready == 8


@pytest.mark.parametrize("trained_again", [0, 2])
async def test_insisting_learner_leaves_sound_ledger(
    server: Peer, service: BufferService, config: RunConfig, trained_again: int
) -> None:
    """Also when the folder with the later checkpoint is back."""
    await server.join()
    async with learner(config) as first:
        await asyncio.to_thread(first.hello, 0)
        await train_steps(server, first, range(4))
        await asyncio.to_thread(first.checkpointed, 4)
    async with learner(config) as insisting:
        counts = (await asyncio.to_thread(insisting.hello, 0, undo=True)).counts
        assert (counts.ready, counts.trained, counts.durable) == (16, 0, 0)
        for step in range(trained_again):
            assert await asyncio.to_thread(insisting.lease, step, count=4, consuming_version=0, wait_s=10.0)
            await asyncio.to_thread(insisting.trained, step)
    assert await service.ledger.verify() == []
    assert (await service.ledger.check_steps()).problems == []
    async with learner(config) as again:
        await asyncio.to_thread(again.hello, 4)
        assert await asyncio.to_thread(again.lease, 4, count=4, consuming_version=0, wait_s=10.0)
        await asyncio.to_thread(again.trained, 4)
    assert await service.ledger.verify() == []
    check = await service.ledger.check_steps()
    assert (check.problems, check.forgotten_step) == ([], 3)


async def test_empty_incarnation_is_dropped(config: RunConfig, service: BufferService, server: Peer) -> None:
    await server.send(m.Finish(request=1, incarnation=""))
    assert (await server.state()).counts.dropped_frames == 1


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"weights": {"publish_every_steps": 2}}, "weights.publish_every_steps"),
        ({"learner": {"groups_per_step": 8}}, "learner.groups_per_step"),
        ({"rollout": {"group_size": 5}}, "rollout.group_size"),
        ({"run": {"seed": 7}}, "run.seed"),
        ({"buffer": {"sampler": {"name": "uniform"}}}, "buffer.sampler"),
        ({"buffer": {"max_staleness": 0}}, "buffer.max_staleness"),
        ({"rollout": {"sampling": {"temperature": 0.5}}}, "rollout.sampling.temperature"),
        ({"rewards": [{"name": "digit_match"}]}, "rewards is 'digit_match"),
        ({"learner": {"advantage": "remax"}}, "greedy baseline"),
    ],
)
async def test_learner_with_other_settings_is_refused(
    service: BufferService, config: RunConfig, change: dict[str, dict[str, object]], key: str
) -> None:
    known = config.model_dump()
    others = {key: known[key] | value if isinstance(value, dict) else value for key, value in change.items()}
    differing = RunConfig.model_validate(known | others)
    async with learner(config) as first, learner(differing) as other:
        await asyncio.to_thread(first.hello, 0)
        with pytest.raises(RefusedError, match=key):
            await asyncio.to_thread(other.hello, 0, model="m2")
        await asyncio.to_thread(first.hello, 0, model="m1")
        await asyncio.to_thread(first.trained, 0)


async def test_first_reported_model_fixes_identity(service: BufferService, config: RunConfig) -> None:
    async with learner(config) as client:
        for model in ("", "m1", ""):
            await asyncio.to_thread(client.hello, 0, model=model)
        with pytest.raises(RefusedError, match=r"m2.*m1"):
            await asyncio.to_thread(client.hello, 0, model="m2")
