"""A learner that is killed and restarts from its checkpoint, at a low staleness: few groups become too stale by it."""

import asyncio
import random
from pathlib import Path

from redis.asyncio import Redis

from slipstream.buffer.store.ledger import Ledger
from tests.faults.accounting import assert_accounted_for
from tests.faults.conftest import MakeRunConfig
from tests.faults.scripted_run import STEPS, scripted_run

KILLS = 12


async def test_killed_learner_loses_few_groups(make_run_config: MakeRunConfig, model: Path, redis: Redis) -> None:
    config, rng = make_run_config(buffer={"max_staleness": 2}), random.Random(5)
    async with scripted_run(config, model) as learner:
        for _ in range(KILLS):
            await asyncio.to_thread(learner.run, killed_after=rng.randint(1, 10))
        await asyncio.to_thread(learner.run)
    assert await assert_accounted_for(redis, config, steps=STEPS) == learner.trained
    counts = await Ledger(redis, config).counts()
    assert counts.reasons.get("expired:too_stale", 0) <= KILLS * config.learner.groups_per_step
