"""Use of generated groups: the real ledger against the expectation."""

import itertools
import math

import numpy as np
import pytest
from redis.asyncio import Redis

from slipstream.buffer.policies.admission import Expectation, expect_use, uses_per_group
from slipstream.buffer.policies.sampling import order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.types import TicketRequest
from slipstream.buffer.wire.messages import LedgerCounts
from slipstream.configs import RunConfig
from slipstream.configs.schema.buffer import BufferConfig
from tests.buffer.conftest import MakeConfig
from tests.buffer.ledger import group

GROUPS_PER_STEP = 8
STEPS, WARM_UP = 60, 15


async def measured_use(redis: Redis, config: RunConfig) -> Expectation:
    """Trains on the real ledger; every granted group is delivered before the next lease."""
    ledger, rng = Ledger.from_config(redis, config), np.random.default_rng(1)
    await ledger.join("r0", "first")
    before = LedgerCounts()
    every = config.weights.publish_every_steps
    for step in range(STEPS):
        assert not await ledger.lease(step, consuming_version=step // every, count=10**6), "stale groups expire"
        (issued,) = await ledger.issue([TicketRequest("r0", step // every, 10**6, tickets=10**6)], train_tasks=100)
        arriving = []
        for task in issued:
            rewards = rng.binomial(1, rng.random(), 8).tolist()
            place = order(
                config.buffer.sampler, number=int(task.id), oldest_version=step // every, rewards=rewards, rng=rng
            )
            arriving.append(group(task.id, oldest_version=step // every, order=place))
        await ledger.deliver(arriving)
        assert await ledger.lease(step, consuming_version=step // every, count=GROUPS_PER_STEP), "deadlock"
        await ledger.train(step)
        if (step + 1) % every == 0:
            await ledger.publish((step + 1) // every, evaluate=False)
        if step == WARM_UP:
            before = await ledger.counts()
    after = await ledger.counts()
    expired = after.expired - before.expired
    left = expired + after.trained - before.trained
    # The groups that are in the buffer before and after have had about as many uses.
    return Expectation(expired / left, (after.uses - before.uses) / left)


CASES = [
    *itertools.product(["fifo", "freshest", "uniform", "prioritized"], [1, 2, 4, 8], [(4, 1)]),
    *itertools.product(["freshest", "uniform", "prioritized"], [1, 4], [(1, 4)]),
    *itertools.product(["fifo"], [4], [(1, 4), (1, 1), (0, 1)]),
]
FEW = [*itertools.product(["fifo", "freshest", "uniform", "prioritized"], [1, 4], [(4, 1)]), ("fifo", 4, (0, 1))]
"""Cases that are not behind the marker."""


@pytest.mark.parametrize(
    ("sampler", "max_uses", "limits"),
    [pytest.param(*case, marks=[] if case in FEW else [pytest.mark.soak], id=str(case)) for case in CASES],
)
async def test_use_of_groups_is_as_expected(
    redis: Redis, make_config: MakeConfig, sampler: str, max_uses: int, limits: tuple[int, int]
) -> None:
    max_staleness, publish_every_steps = limits
    config = make_config(sampler={"name": sampler}, limiter={"max_uses": max_uses}, max_staleness=max_staleness)
    learner = config.learner.model_copy(update={"groups_per_step": GROUPS_PER_STEP})
    weights = config.weights.model_copy(update={"publish_every_steps": publish_every_steps})
    config = config.model_copy(update={"learner": learner, "weights": weights})
    found = await measured_use(redis, config)
    expected = expect_use(config.buffer, groups_per_step=GROUPS_PER_STEP, publish_every_steps=publish_every_steps)
    print(f"{sampler} {max_uses} {limits}: measured {found}, expected {expected}")  # noqa: T201 - for docs/figures.md
    assert found.never_used == pytest.approx(expected.never_used, abs=0.05)
    assert found.uses == pytest.approx(expected.uses, rel=0.1)
    if sampler == "fifo":
        assert found.never_used <= 0.01


@pytest.mark.parametrize(
    ("limiter", "max_staleness", "publish_every_steps", "uses"),
    [
        ({"max_uses": 4}, 4, 1, 4), ({"max_uses": 8}, 4, 1, 5), ({"max_uses": 8}, 0, 3, 3),
        ({"max_uses": 4, "samples_per_insert": 1.5}, 4, 1, 1.5), ({"samples_per_insert": 0.5}, 4, 1, 1),
    ],
)  # fmt: skip
def test_uses_are_bounded(limiter: dict[str, float], max_staleness: int, publish_every_steps: int, uses: float) -> None:
    buffer = BufferConfig.model_validate({"limiter": limiter, "max_staleness": max_staleness})
    assert uses_per_group(buffer, publish_every_steps=publish_every_steps) == uses


def test_expectation_of_huge_pipeline_takes_no_time() -> None:
    buffer = BufferConfig.model_validate({"sampler": {"name": "uniform"}, "max_staleness": 10**6})
    expected = expect_use(buffer, groups_per_step=4096, publish_every_steps=1)
    assert expected.never_used == pytest.approx(math.exp(-1), abs=0.05)
