"""Shorthand for the ledger's operations, with the settings that most tests don't care about."""

from collections.abc import Sequence

from slipstream.buffer.store import DeliveredGroup, IssuedTask, RedisStore

LATER_S = 1000.0
AT_ONCE_S = 0.0
"""A deadline that has passed by the next command."""

TRAIN_TASKS = 5


async def issue(
    store: RedisStore,
    credits: int,
    *,
    server: str = "r0",
    server_version: int = 0,
    max_staleness: int = 1,
    groups_per_version: int = 4,
    deadline_s: float = LATER_S,
) -> list[IssuedTask]:
    return await store.issue(
        server,
        server_version=server_version,
        credits=credits,
        max_staleness=max_staleness,
        groups_per_version=groups_per_version,
        deadline_s=deadline_s,
        train_tasks=TRAIN_TASKS,
    )


async def deliver(store: RedisStore, ids: Sequence[str], *, oldest_version: int = 0) -> list[str]:
    return await store.deliver(
        [DeliveredGroup(id, oldest_version, action_tokens=3, blob=f"bytes of {id}".encode()) for id in ids]
    )


async def lease(
    store: RedisStore,
    step: int,
    count: int,
    *,
    consuming_version: int = 0,
    max_staleness: int = 1,
    deadline_s: float = LATER_S,
) -> list[str]:
    return await store.lease(
        step, consuming_version=consuming_version, count=count, max_staleness=max_staleness, deadline_s=deadline_s
    )


async def ready(store: RedisStore, count: int, *, oldest_version: int = 0) -> list[str]:
    """Issues and delivers that many groups."""
    ids = [task.id for task in await issue(store, count, max_staleness=100, server_version=0)]
    assert len(ids) == count
    assert await deliver(store, ids, oldest_version=oldest_version) == ["ready"] * count
    return ids


async def leased(store: RedisStore, step: int, count: int, *, deadline_s: float = LATER_S) -> list[str]:
    """Gets that many groups ready and leases them for `step`."""
    ids = await ready(store, count)
    assert await lease(store, step, count, deadline_s=deadline_s) == ids
    return ids
