"""The throttle: a lowered staleness bound stops tickets, and nothing else."""

import asyncio

from slipstream.buffer.store.ledger import Ledger
from slipstream.configs import RunConfig
from tests.buffer.groups import answered
from tests.buffer.ledger import deliver, issue, lease, states
from tests.buffer.peers import Peer, connected, learner, serving


async def test_smaller_staleness_bound_holds(store: Ledger) -> None:
    for effective in (0, 1, 2, 3, 9):  # each raised bound issues the tickets of one version more
        await store.throttle(effective)
        assert len(await issue(store, 100, max_staleness=3)) == (4 if effective <= 3 else 0)
        assert await issue(store, 100, max_staleness=3) == []
    assert await states(store) == {"in_flight": 16}


async def test_lowered_bound_stops_tickets_until_drained(store: Ledger) -> None:
    ids = [task.id for task in await issue(store, 100, max_staleness=2)]
    assert len(ids) == 12
    await store.throttle(0)
    for step in range(2):
        await deliver(store, ids[4 * step : 4 * step + 4], oldest_version=step)
        await lease(store, step, 4, consuming_version=step, max_staleness=2)
        await store.train(step)
        await store.publish(step + 1, evaluate=False)
        assert await issue(store, 100, server_version=step + 1, max_staleness=2) == [], f"after step {step}"
    await deliver(store, ids[8:10], oldest_version=2)
    assert await issue(store, 100, server_version=2, max_staleness=2) == []
    await deliver(store, ids[10:], oldest_version=2)
    await lease(store, 2, 4, consuming_version=2, max_staleness=2)
    await store.train(2)
    await store.publish(3, evaluate=False)
    assert len(await issue(store, 100, server_version=3, max_staleness=2)) == 4
    assert await store.verify() == []


async def test_training_continues_at_bound_zero(store: Ledger) -> None:
    await store.throttle(0)
    for step in range(3):
        ids = [task.id for task in await issue(store, 100, server_version=step, max_staleness=5)]
        assert len(ids) == 4, f"step {step}"
        await deliver(store, ids, oldest_version=step)
        assert await lease(store, step, 4, consuming_version=step, max_staleness=5) == ids
        await store.train(step)
        assert await issue(store, 100, server_version=step, max_staleness=5) == []
        await store.publish(step + 1, evaluate=False)
    assert await store.verify() == []


async def test_lease_uses_configured_bound(store: Ledger) -> None:
    ids = [task.id for task in await issue(store, 100, max_staleness=1)]
    await store.throttle(0)
    await store.publish(1, evaluate=False)
    await deliver(store, ids[:4])
    assert await lease(store, 0, 4, consuming_version=1, max_staleness=1) == ids[:4]


# --- through the service -------------------------------------------------------------------------------------------


async def throttled(config: RunConfig, max_staleness: int) -> None:
    """Sets the bound through the service."""
    async with learner(config) as client:
        state = await asyncio.to_thread(client.throttle, max_staleness)
    assert state.version == 0


async def test_learner_changes_bound(server: Peer, config: RunConfig) -> None:
    await throttled(config, 0)
    await server.join(credits=100)
    assert len(await server.tickets()) == 4
    await server.credits(100)
    assert (await server.state()).counts.issued == 4
    await throttled(config, 1 << 30)
    assert len(await server.tickets()) == 4, "8 = (max_staleness + 1) · groups_per_version, and never more"
    await server.credits(100)
    assert (await server.state()).counts.issued == 8


async def test_bound_survives_service_restart(config: RunConfig) -> None:
    async with serving(config):
        await throttled(config, 0)
    async with serving(config) as service, connected(config) as server:
        await server.join(credits=100)
        tickets = await server.tickets()
        assert len(tickets) == 4
        await server.credits(100, held=[ticket.id for ticket in tickets])
        await server.deliver(*(answered(ticket) for ticket in tickets))
        assert (await server.state()).counts.issued == 4
        assert await service.ledger.verify() == []
