"""Jumps of Redis's clock during a run: no group is lost."""

import asyncio
import random
from pathlib import Path

import pytest
from redis.asyncio import Redis

from slipstream.buffer.store.redis import run_prefix
from slipstream.configs import RunConfig
from tests.faults.accounting import assert_accounted_for
from tests.faults.conftest import MakeRunConfig
from tests.faults.scripted_run import STEPS, scripted_run

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
"""Shifts every time in the ledger, which equals a jump of the clock in the other direction."""


@pytest.mark.timeout(150)
@pytest.mark.usefixtures("short_retries")
async def test_clock_jumps_lose_no_group(make_run_config: MakeRunConfig, redis: Redis, model: Path) -> None:
    config: RunConfig = make_run_config()
    rng = random.Random(5)
    async with scripted_run(config, model) as learner, asyncio.timeout(DEADLINE_S):
        training = asyncio.create_task(asyncio.to_thread(learner.run))
        for at_step in range(5, STEPS, 5):
            while learner.step < at_step and not training.done():
                await asyncio.sleep(0.01)
            jump_s = rng.choice([-1, 1]) * rng.uniform(1, HOURS_S)
            await redis.eval(SHIFT, 1, run_prefix(config.run.name), jump_s)
        await training
    assert await assert_accounted_for(redis, config, steps=STEPS) == learner.trained
