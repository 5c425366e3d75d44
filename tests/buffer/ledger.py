"""Operations of the ledger with default settings for tests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.buffer.policies.curriculum import Place
from slipstream.buffer.policies.limiter import UNBOUNDED, Bounds
from slipstream.buffer.policies.sampling import Order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.scripts import run_prefix
from slipstream.buffer.store.types import DeliveredGroup, Facts, IssuedTask, LedgerRules, TicketRequest
from slipstream.buffer.wire.messages import LedgerCounts
from slipstream.configs.schema.buffer import RetentionConfig

LATER_S = 1000.0
AT_ONCE_S = 0.0
"""A deadline that has passed by the next command."""

TRAIN_TASKS = 5

RULES = LedgerRules(
    max_staleness=1, groups_per_version=4, ticket_deadline_s=LATER_S, lease_deadline_s=LATER_S, eval_tasks=10**6
)


def ruled(ledger: Ledger, **rules: Any) -> Ledger:
    """The same ledger under other rules."""
    return Ledger(ledger._redis, ledger.run, replace(ledger.rules, **rules))


async def issue(
    store: Ledger, credits: int, *, server: str = "r0", server_version: int = 0, deadline_s: float = LATER_S,
    skip: Sequence[Place] = (), **rules: Any,
) -> list[IssuedTask]:  # fmt: skip
    """Grants a server tickets, by default under these `rules` whatever the ledger's are."""
    await store.join(server, "first")
    rules = {"max_staleness": 1, "groups_per_version": 4, "bounds": UNBOUNDED, "ticket_deadline_s": deadline_s} | rules
    store = ruled(store, **rules)
    request = TicketRequest(server, server_version, credits, tickets=credits)
    return (await store.issue([request], train_tasks=TRAIN_TASKS, skip=skip))[0]


def group(
    id: str, *, oldest_version: int = 0, newest_version: int = 0, order: Order | None = None, length: int = 3,
    dropped: Mapping[str, Mapping[int, int]] | None = None,
) -> DeliveredGroup:  # fmt: skip
    """One answer of `length` tokens, in the order of the tickets."""
    return DeliveredGroup(
        id, blob=f"bytes of {id}".encode(), oldest_version=oldest_version,
        newest_version=max(oldest_version, newest_version),
        order=order or Order(key=float(id) if id.isdecimal() else 0.0, raced=False, weight=1.0),
        facts=Facts(tokens=length, delivered={length: 1}, kept={length: 1}, dropped=dropped or {}),
    )  # fmt: skip


async def deliver(store: Ledger, ids: Sequence[str], *, oldest_version: int = 0, length: int = 3) -> list[str]:
    return await store.deliver([group(id, oldest_version=oldest_version, length=length) for id in ids])


async def heartbeat(store: Ledger, server: str, held: Sequence[str], *, grace_s: float = LATER_S) -> int:
    """Number of lost tickets."""
    return (await store.heartbeat({server: held}, grace_s=grace_s)).get(server, 0)


async def fail(store: Ledger, id: str, *, reason: str = "broken", tokens: int = 0) -> str:
    return await store.filter(id, reason=reason, facts=Facts(tokens=tokens))


async def lease(
    store: Ledger, step: int, count: int, *, consuming_version: int = 0, max_staleness: int = 1,
    deadline_s: float = LATER_S, groups_per_version: int = 4, bounds: Bounds = UNBOUNDED,
) -> list[str]:  # fmt: skip
    rules = {"max_staleness": max_staleness, "groups_per_version": groups_per_version, "bounds": bounds}
    store = ruled(store, lease_deadline_s=deadline_s, **rules)
    found = await store.lease(step, consuming_version=consuming_version, count=count)
    return found.ids if found else []


async def sweep(store: Ledger) -> tuple[int, int]:
    """Tickets and leased groups whose deadline has passed."""
    swept = await store.sweep(silent_s=None)
    return swept.tickets, swept.leases


async def ready(store: Ledger, count: int, *, oldest_version: int = 0, length: int = 3) -> list[str]:
    """Issues and delivers that many groups."""
    ids = [task.id for task in await issue(store, count, max_staleness=100, server_version=0)]
    assert len(ids) == count
    assert await deliver(store, ids, oldest_version=oldest_version, length=length) == ["ready"] * count
    return ids


async def leased(store: Ledger, step: int, count: int, *, deadline_s: float = LATER_S) -> list[str]:
    """Gets that many groups ready and leases them for `step`."""
    ids = await ready(store, count)
    assert await lease(store, step, count, deadline_s=deadline_s) == ids
    return ids


async def counts(store: Ledger) -> LedgerCounts:
    """Groups by state."""
    return (await store.snapshot()).counts


async def states(store: Ledger) -> dict[str, int]:
    """The states that hold groups; the others are empty."""
    counted = await counts(store)
    names = ("in_flight", "ready", "leased", "trained", "durable", "filtered", "expired", "reissued")
    found = {name: getattr(counted, name) for name in names}
    assert counted.issued == sum(found.values()) - counted.durable, "a group is in no state, or in two"
    return {name: count for name, count in found.items() if count}


async def trim(store: Ledger, *, keep: int, max_age_s: float | None, until_exported: bool) -> int:
    retention = RetentionConfig(max_groups=keep, max_age_s=max_age_s, keep_until_exported=until_exported)
    return await ruled(store, retention=retention).trim()


async def tickets_of(store: Ledger, server: str) -> int:
    """Tickets that a server is charged for, those that were issued again included."""
    charged: int = await store._redis.scard(f"{run_prefix(store.run)}:tickets_of:{server}")
    return charged
