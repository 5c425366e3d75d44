"""Sharing of work among simulated rollout servers, over real sockets and a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing

import pytest

from benchmarks.fleet import SimulatedFleet, spread
from slipstream.buffer.client import BufferClient
from slipstream.buffer.service import BufferService
from slipstream.configs import RunConfig
from tests.buffer.conftest import MakeConfig
from tests.buffer.peers import serving

STEPS = 20
GROUPS_PER_STEP = 32
MOST = 1.2
"""Largest work of a server, divided by the mean."""
STEP_S = 0.05


@pytest.fixture
def config(make_config: MakeConfig) -> RunConfig:
    """The default capacity: 160 groups."""
    config = make_config(max_staleness=4)
    return config.model_copy(update={"learner": config.learner.model_copy(update={"groups_per_step": GROUPS_PER_STEP})})


@pytest.fixture
async def service(config: RunConfig) -> AsyncIterator[BufferService]:
    async with serving(config) as running:
        yield running


@pytest.fixture
async def fleet(config: RunConfig, service: BufferService) -> AsyncIterator[SimulatedFleet]:
    running = SimulatedFleet(config)
    yield running
    await running.close()


async def test_equal_servers_share_equally_despite_churn(
    config: RunConfig, service: BufferService, fleet: SimulatedFleet
) -> None:
    names, new = [f"server{n}" for n in range(16)], [f"new{n}" for n in range(8)]
    with closing(BufferClient(config, "learner")) as learner:
        await asyncio.to_thread(learner.hello, 0)
        await fleet.join(dict.fromkeys(names, 0.01))
        await fleet.train(learner, range(5), step_s=STEP_S)
        before = fleet.delivered()
        await fleet.train(learner, range(5, STEPS), step_s=STEP_S)
        assert spread(fleet.delivered() - before, names) <= MOST
        await fleet.leave(names[:8])
        await fleet.join(dict.fromkeys(new, 0.01))
        before = fleet.delivered()
        state = await fleet.train(learner, range(STEPS, 2 * STEPS), step_s=STEP_S)
        assert spread(fleet.delivered() - before, [*names[8:], *new]) <= MOST
    assert state.counts.expired <= 0.01 * state.counts.issued
    assert await service.ledger.verify() == []


async def test_slow_servers_do_not_hold_back_fast_ones(
    config: RunConfig, service: BufferService, fleet: SimulatedFleet
) -> None:
    """Eight servers take ten times as long as the others; all groups are trained on while they are fresh enough."""
    fast, slow = [f"fast{n}" for n in range(8)], [f"slow{n}" for n in range(8)]
    with closing(BufferClient(config, "learner")) as learner:
        await asyncio.to_thread(learner.hello, 0)
        await fleet.join(dict.fromkeys(slow, 0.1) | dict.fromkeys(fast, 0.01))
        before = fleet.delivered()
        state = await fleet.train(learner, range(STEPS), step_s=0.2)
        work = fleet.delivered() - before
    assert spread(work, fast) <= MOST
    assert spread(work, slow) <= MOST
    assert min(work[name] for name in fast) > max(work[name] for name in slow)
    assert min(work.values()) > 0
    assert state.counts.expired <= 0.05 * state.counts.issued
    assert await service.ledger.verify() == []
