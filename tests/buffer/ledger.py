"""Operations of the ledger with default settings for tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from slipstream.buffer.handlers.inspection import Inspector
from slipstream.buffer.policies.curriculum import Place
from slipstream.buffer.policies.sampling import Order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import run_prefix
from slipstream.buffer.store.types import SPILL_BYTES, DeliveredGroup, Facts, IssuedTask, Origin, TicketRequest
from slipstream.buffer.wire.codec import encode
from slipstream.buffer.wire.messages import Group, LedgerCounts
from slipstream.configs import RunConfig
from slipstream.configs.schema.buffer import LimiterConfig, RetentionConfig

LATER_S = 1000.0
AT_ONCE_S = 0.0
"""A deadline that has passed by the next command."""

TRAIN_TASKS = 5
ENV = "digits"

UNBOUNDED = LimiterConfig()


def ledger(redis: Redis, run: str, *, spill_bytes: int = SPILL_BYTES, **settings: Any) -> Ledger:
    """The ledger of a run with these settings, named as by `ruled`."""
    config = RunConfig.model_validate(
        {
            "run": {"name": run},
            "model": {"build": "digits"},
            "learner": {"groups_per_step": 1},
            "eval": {"tasks": 10**6},
            "weights": {"publish_every_steps": 4},
            "buffer": {"max_staleness": 1, "ticket_deadline_s": LATER_S, "lease_deadline_s": LATER_S},
        }
    )
    return ruled(Ledger(redis, config, spill_bytes=spill_bytes), **settings)


def ruled(ledger: Ledger, *, spill_bytes: int | None = None, **settings: Any) -> Ledger:
    """The same ledger with other settings: `seed`, `groups_per_step`, `groups_per_version`, or keys of `buffer`, of its
    limiter or its sampler.
    """
    config, buffer = ledger.config, ledger.config.buffer
    run = config.run.model_copy(update={"seed": settings.pop("seed", config.run.seed)})
    step = settings.pop("groups_per_step", config.learner.groups_per_step)
    every = settings.pop("groups_per_version", step * config.weights.publish_every_steps) // step
    limiter = settings.pop("limiter", buffer.limiter)
    limiter = limiter.model_copy(update={"max_uses": settings.pop("max_uses", buffer.limiter.max_uses)})
    exponent = settings.pop("importance_exponent", buffer.sampler.importance_exponent)
    sampler = buffer.sampler.model_copy(update={"importance_exponent": exponent})
    sections = {
        "run": run,
        "learner": config.learner.model_copy(update={"groups_per_step": step}),
        "weights": config.weights.model_copy(update={"publish_every_steps": every}),
        "buffer": buffer.model_copy(update={"limiter": limiter, "sampler": sampler, **settings}),
    }
    config = config.model_copy(update=sections)
    return Ledger(ledger._redis, config, spill_bytes=ledger.spill_bytes if spill_bytes is None else spill_bytes)


async def issue(
    store: Ledger,
    credits: int,
    *,
    server: str = "r0",
    server_version: int = 0,
    deadline_s: float = LATER_S,
    skip: Sequence[Place] = (),
    **rules: Any,
) -> list[IssuedTask]:
    """Grants a server tickets, by default under these `rules` whatever the ledger's are."""
    await store.join(server, "first")
    defaults = {"max_staleness": 1, "groups_per_version": 4, "limiter": UNBOUNDED, "ticket_deadline_s": deadline_s}
    store = ruled(store, **{**defaults, **rules})
    request = TicketRequest(server, server_version, credits, tickets=credits)
    return (await store.issue([request], train_tasks=TRAIN_TASKS, skip=skip))[0]


def group(
    id: str,
    *,
    oldest_version: int = 0,
    newest_version: int = 0,
    order: Order | None = None,
    length: int = 3,
    dropped: Mapping[str, Mapping[int, int]] | None = None,
    server: str = "r0",
) -> DeliveredGroup:
    """One answer of `length` tokens, in the order of the tickets; for the account `dropped` has none."""
    return DeliveredGroup(
        id,
        blob=f"bytes of {id}".encode(),
        oldest_version=oldest_version,
        newest_version=max(oldest_version, newest_version),
        order=order or Order(key=float(id) if id.isdecimal() else 0.0, raced=False, weight=1.0),
        facts=Facts(tokens=length, delivered={length: 1}, kept={length: 1}, dropped=dropped or {}, kept_tokens=length),
        origin=Origin(server, ENV, length),
    )


def arrived(group: Group, config: RunConfig) -> DeliveredGroup:
    """A real group, as the service would store it."""
    tokens = sum(span.end - span.start for trajectory in group.trajectories for span in trajectory.spans)
    stored = Inspector(config).admit(group, encode(group), Origin("r0", ENV, tokens))
    assert isinstance(stored, DeliveredGroup)
    return stored


async def deliver(
    store: Ledger, ids: Sequence[str], *, oldest_version: int = 0, length: int = 3, server: str = "r0"
) -> list[str]:
    return await store.deliver([group(id, oldest_version=oldest_version, length=length, server=server) for id in ids])


async def heartbeat(
    store: Ledger,
    server: str,
    held: Sequence[str],
    *,
    grace_s: float = LATER_S,
    sampled: Mapping[str, int] | None = None,
) -> int:
    """Number of lost tickets. `sampled`: tokens so far by ticket."""
    reports = {server: {ENV: dict(sampled or {})}}
    return (await store.heartbeat({server: held}, sampled=reports, grace_s=grace_s)).get(server, 0)


async def fail(store: Ledger, id: str, *, reason: str = "broken", tokens: int = 0, server: str = "r0") -> str:
    facts = Facts(tokens=tokens, lost={reason: tokens})
    return await store.filter(id, reason=reason, facts=facts, origin=Origin(server, ENV, tokens))


async def lease(
    store: Ledger,
    step: int,
    count: int,
    *,
    consuming_version: int = 0,
    max_staleness: int = 1,
    deadline_s: float = LATER_S,
    groups_per_version: int = 4,
    limiter: LimiterConfig = UNBOUNDED,
) -> list[str]:
    store = ruled(
        store,
        max_staleness=max_staleness,
        groups_per_version=groups_per_version,
        limiter=limiter,
        lease_deadline_s=deadline_s,
    )
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
