"""Redis's clock jumps while a run is under way: whatever deadline that ends or prolongs, nothing is lost."""

import asyncio
import random
from pathlib import Path

import pytest
from redis.asyncio import Redis

from slipstream.buffer.store.scripts import run_prefix
from slipstream.configs import RunConfig
from tests.faults.accounting import assert_accounted_for
from tests.faults.conftest import MakeCrewConfig
from tests.faults.crew import STEPS, crew

HOURS_S = 3 * 3600.0
DEADLINE_S = 90.0
SHIFT = """
for _, name in ipairs({'issued', 'leased', 'heard'}) do
  for _, member in ipairs(redis.call('ZRANGE', KEYS[1] .. ':' .. name, 0, -1)) do
    redis.call('ZINCRBY', KEYS[1] .. ':' .. name, ARGV[1], member)
    if name == 'issued' then redis.call('HINCRBYFLOAT', KEYS[1] .. ':about:' .. member, 'issued_at', ARGV[1]) end
  end
end
"""
"""Moves every time that the ledger has noted: to it, that is the clock's jump the other way."""


@pytest.mark.timeout(150)
@pytest.mark.usefixtures("hasty")
async def test_clock_jumps_lose_no_group(make_crew_config: MakeCrewConfig, redis: Redis, model: Path) -> None:
    config: RunConfig = make_crew_config()
    rng = random.Random(5)
    async with crew(config, model) as learner, asyncio.timeout(DEADLINE_S):
        training = asyncio.create_task(asyncio.to_thread(learner.run))
        for at_step in range(5, STEPS, 5):
            while learner.step < at_step and not training.done():
                await asyncio.sleep(0.01)
            jump_s = rng.choice([-1, 1]) * rng.uniform(1, HOURS_S)
            await redis.eval(SHIFT, 1, run_prefix(config.run.name), jump_s)
        await training
    assert await assert_accounted_for(redis, config, steps=STEPS) == learner.trained
