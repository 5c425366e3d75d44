"""Use of generated groups under admission and sampler."""

import numpy as np
import pytest
from redis.asyncio import Redis

from slipstream.buffer.policies.admission import uses_per_group
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


async def measured_use(redis: Redis, config: RunConfig) -> tuple[float, float]:
    """Share of groups that expire unused, and uses of a group; all granted groups come before the next lease."""
    ledger, rng = Ledger(redis, config), np.random.default_rng(1)
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
    return expired / left, (after.uses - before.uses) / left


@pytest.mark.parametrize(
    ("sampler", "max_uses", "limits", "never_used", "uses"),
    [
        ("fifo", 1, (4, 1), 0.00, 1.00),
        pytest.param("fifo", 2, (4, 1), 0.00, 1.84, marks=pytest.mark.soak),
        ("fifo", 4, (4, 1), 0.00, 3.34),
        pytest.param("fifo", 8, (4, 1), 0.00, 3.99, marks=pytest.mark.soak),
        ("freshest", 1, (4, 1), 0.44, 0.56),
        pytest.param("freshest", 2, (4, 1), 0.06, 1.11, marks=pytest.mark.soak),
        ("freshest", 4, (4, 1), 0.00, 2.50),
        pytest.param("freshest", 8, (4, 1), 0.00, 3.33, marks=pytest.mark.soak),
        ("uniform", 1, (4, 1), 0.33, 0.67),
        pytest.param("uniform", 2, (4, 1), 0.13, 1.40, marks=pytest.mark.soak),
        ("uniform", 4, (4, 1), 0.02, 2.92),
        pytest.param("uniform", 8, (4, 1), 0.00, 3.73, marks=pytest.mark.soak),
        ("prioritized", 1, (4, 1), 0.36, 0.64),
        pytest.param("prioritized", 2, (4, 1), 0.26, 1.35, marks=pytest.mark.soak),
        ("prioritized", 4, (4, 1), 0.20, 2.84),
        pytest.param("prioritized", 8, (4, 1), 0.11, 3.66, marks=pytest.mark.soak),
        pytest.param("freshest", 1, (1, 4), 0.33, 0.67, marks=pytest.mark.soak),
        pytest.param("freshest", 4, (1, 4), 0.33, 2.67, marks=pytest.mark.soak),
        pytest.param("uniform", 1, (1, 4), 0.25, 0.75, marks=pytest.mark.soak),
        pytest.param("uniform", 4, (1, 4), 0.02, 3.21, marks=pytest.mark.soak),
        pytest.param("prioritized", 1, (1, 4), 0.28, 0.72, marks=pytest.mark.soak),
        pytest.param("prioritized", 4, (1, 4), 0.18, 3.03, marks=pytest.mark.soak),
        pytest.param("fifo", 4, (1, 4), 0.00, 4.00, marks=pytest.mark.soak),
        pytest.param("fifo", 4, (1, 1), 0.00, 1.70, marks=pytest.mark.soak),
        ("fifo", 4, (0, 1), 0.00, 1.00),
    ],
)
async def test_use_of_groups_is_as_expected(
    redis: Redis,
    make_config: MakeConfig,
    sampler: str,
    max_uses: int,
    limits: tuple[int, int],
    never_used: float,
    uses: float,
) -> None:
    max_staleness, publish_every_steps = limits
    config = make_config(sampler={"name": sampler}, limiter={"max_uses": max_uses}, max_staleness=max_staleness)
    learner = config.learner.model_copy(update={"groups_per_step": GROUPS_PER_STEP})
    weights = config.weights.model_copy(update={"publish_every_steps": publish_every_steps})
    measured = await measured_use(redis, config.model_copy(update={"learner": learner, "weights": weights}))
    assert measured[0] == pytest.approx(never_used, abs=0.01 if sampler == "fifo" else 0.05)
    assert measured[1] == pytest.approx(uses, rel=0.1)


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
