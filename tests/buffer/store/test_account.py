"""The account of generated tokens: it closes to the token, whatever becomes of groups, servers and steps."""

from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from slipstream.buffer.handlers.inspection import Dropped, Inspector
from slipstream.buffer.store.account import Account, Tokens, account
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import run_prefix
from slipstream.buffer.store.types import Facts, Origin
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from tests.buffer.conftest import MakeConfig
from tests.buffer.groups import trajectory
from tests.buffer.ledger import (
    ENV,
    deliver,
    fail,
    group,
    heartbeat,
    issue,
    lease,
    leased,
    ready,
    ruled,
    sweep,
    trim,
)

NUMBERS = ("trained", "ready", "leased", "in_flight", "evaluation")


async def parts(store: Ledger) -> dict[str, int]:
    """The entries that are not zero, of all rows together; the account closes and the ledger is sound."""
    assert await store.verify() == []
    total = (await account(store.scripts)).total
    found = {name: getattr(total, name) for name in NUMBERS} | {f"lost {why}": n for why, n in total.lost.items()}
    assert total.generated == sum(found.values())
    return {name: tokens for name, tokens in found.items() if tokens}


NEVER = -1


async def expiry_s(store: Ledger) -> int:
    """Seconds for which the unsettled tickets of `r0` are still known."""
    return int(await store.scripts.redis.ttl(f"{store.scripts.prefix}:unsettled:r0"))


async def test_group_moves_through_the_account(store: Ledger) -> None:
    (task,) = await issue(store, 1)
    await heartbeat(store, "r0", [task.id], sampled={task.id: 5})
    assert await parts(store) == {"in_flight": 5}
    stored = group(task.id, length=6)
    facts = replace(stored.facts, lost={"unfinished": 2, "length": 1})
    assert await store.deliver([replace(stored, facts=facts, origin=Origin("r0", ENV, 9))]) == ["ready"]
    dropped = {"lost unfinished": 2, "lost length": 1}
    assert await parts(store) == {"ready": 6, **dropped}
    await heartbeat(store, "r0", [task.id], sampled={task.id: 9})  # sent before the acknowledgement arrived
    assert await deliver(store, [task.id], length=9) == ["duplicate"]  # the acknowledgement was lost
    assert await parts(store) == {"ready": 6, **dropped}
    await lease(store, 0, 1)
    assert await parts(store) == {"leased": 6, **dropped}
    await store.train(0)
    await store.durable(1)
    assert await trim(store, keep=0, max_age_s=None, until_exported=False) == 1
    assert await parts(store) == {"trained": 6, **dropped}


async def test_undone_steps_give_their_tokens_back(store: Ledger) -> None:
    twice = ruled(store, max_uses=2)
    (first,) = await leased(twice, 0, 1)
    for step in range(2):
        await lease(twice, step, 1)
        await twice.train(step)
    total = (await account(store.scripts)).total
    assert (total.trained, total.uses) == (3, 6), "trained once, used twice"
    await twice.restart(1, learner="a")
    total = (await account(store.scripts)).total
    assert (total.trained, total.ready, total.uses) == (3, 0, 3), "to be used again"
    await twice.restart(0, learner="b")
    assert await parts(twice) == {"ready": 3}
    assert await lease(twice, 0, 1, consuming_version=9, max_staleness=0) == []
    assert await parts(twice) == {"lost too_stale": 3}, first


async def test_failed_ticket(store: Ledger) -> None:
    (task,) = await issue(store, 1)
    await heartbeat(store, "r0", [task.id], sampled={task.id: 4})
    assert await fail(store, task.id, reason="env_error", tokens=7) == "filtered"
    assert await parts(store) == {"lost env_error": 7}


async def test_tickets_of_a_killed_server_are_lost(store: Ledger) -> None:
    one, other = await issue(store, 2)
    await heartbeat(store, "r0", [one.id, other.id], sampled={one.id: 4, other.id: 3})
    await store.join("r0", "its successor")
    assert await parts(store) == {"lost server_lost": 7}
    assert await deliver(store, [one.id], length=9) == ["void"], "of the killed process"
    assert await parts(store) == {"lost server_lost": 7}


async def test_silent_server_returns_with_its_tickets(store: Ledger) -> None:
    one, other = await issue(store, 2)
    held = [one.id, other.id]
    await heartbeat(store, "r0", held, sampled={one.id: 4, other.id: 3})
    await store.sweep(silent_s=0.0)
    assert await parts(store) == {"lost server_lost": 7}
    assert await expiry_s(store) > 0
    await store.join("r0", "first")
    assert await expiry_s(store) == NEVER
    await heartbeat(store, "r0", held, sampled={one.id: 6, other.id: 3})
    assert await parts(store) == {"in_flight": 9}
    for _ in range(2):
        assert await deliver(store, [one.id], length=8) == ["void"]
        assert await parts(store) == {"in_flight": 3, "lost ticket_expired": 8}


async def test_stopped_server_reports_what_it_gives_back(store: Ledger) -> None:
    (task,) = await issue(store, 1)
    await heartbeat(store, "r0", [task.id], sampled={task.id: 4})
    await store.leave("r0", "first", sampled={ENV: {task.id: 6}})
    assert await parts(store) == {"lost server_stopped": 6}


async def test_end_of_the_run(store: Ledger) -> None:
    one, other = await issue(store, 2)
    await heartbeat(store, "r0", [one.id, other.id], sampled={one.id: 4})
    await store.finish()
    assert await parts(store) == {"lost run_finished": 4}
    await heartbeat(store, "r0", [one.id, other.id], sampled={one.id: 5, other.id: 2})
    assert await deliver(store, [one.id], length=6) == ["finished"]
    assert await parts(store) == {"lost run_finished": 8}
    assert await expiry_s(store) == NEVER, "the server may go on for days"
    await store.restart(0, learner="a")  # goes on
    await heartbeat(store, "r0", [other.id], sampled={other.id: 2})
    assert await parts(store) == {"in_flight": 2, "lost run_finished": 6}


async def test_expired_ticket_counts_until_it_is_settled(store: Ledger) -> None:
    (task,) = await issue(store, 1, deadline_s=0.0)
    await heartbeat(store, "r0", [task.id], sampled={task.id: 4})
    assert await sweep(store) == (1, 0)
    assert await trim(store, keep=0, max_age_s=None, until_exported=False) == 1
    await heartbeat(store, "r0", [task.id], sampled={task.id: 5})
    assert await parts(store) == {"in_flight": 5}
    assert await fail(store, task.id, reason="env_error", tokens=6) == "void"
    assert await parts(store) == {"lost ticket_expired": 6}


async def test_ticket_that_redis_has_lost_the_end_of(store: Ledger) -> None:
    (task,) = await issue(store, 1)
    await heartbeat(store, "r0", [task.id], sampled={task.id: 4})
    assert await heartbeat(store, "r0", [], grace_s=-1.0) == 1
    assert await parts(store) == {"lost redis_lost": 4}


async def test_evaluations_have_rows_of_their_own(store: Ledger) -> None:
    await store.publish(3, evaluate=True)
    await store.join("r0", "first")
    _, (answered, failed, late) = await store.evaluations.grant(3, server="r0", eval_tasks=150, share=150)
    reports: dict[str, m.Sampled] = {"r0": {"": {work.id: 5 for work in (answered, failed, late)}}}
    await store.heartbeat({"r0": [answered.id, failed.id, late.id]}, sampled=reports, grace_s=9.0)
    assert await parts(store) == {"in_flight": 15}
    done: dict[str, Any] = {"version": 3, "failures": {}, "tallies": {"score": (0.0, 0.0)}, "blob": b""}
    origin = Origin("r0", "", 9)
    for outcome in ("evaluated", "duplicate"):
        lost = {"superseded": 2}
        assert await store.evaluations.record(answered, **done, origin=origin, tokens=7, lost=lost) == outcome
    await store.evaluations.record_failure(failed.id, reason="env_error", origin=origin, lost={"env_error": 9})
    await store.publish(4, evaluate=True)
    assert await store.evaluations.record(late, **done, origin=origin, tokens=9) == "void"
    lost = {"lost superseded": 2, "lost env_error": 9, "lost ticket_expired": 9}
    assert await parts(store) == {"evaluation": 7, **lost}
    (row,) = (await account(store.scripts)).rows
    assert (row.kind, row.env, row.server) == ("eval", "evaluation", "r0")


async def test_row_that_does_not_close_names_its_groups(store: Ledger) -> None:
    honest, wrong = await issue(store, 2)
    await deliver(store, [honest.id], length=5)
    await store.deliver([replace(group(wrong.id, length=5), origin=Origin("r1", ENV, 7))])
    found = await account(store.scripts)
    assert [(row.server, row.difference, row.closes) for row in found.rows] == [("r0", 0, True), ("r1", 2, False)]
    assert found.as_json()["groups"] == {wrong.id: 2}
    (problem,) = await store.verify()
    assert f"{wrong.id} (+2)" in problem


async def test_rows_are_bounded(redis: Redis, store: Ledger) -> None:
    for number in range(4096):
        await redis.hset(f"{run_prefix(store.run)}:account_rows", f'["r{number}","{ENV}"]', str(number + 1))
    tasks = await issue(store, 2)
    for number, task in enumerate(tasks):
        await deliver(store, [task.id], server=f"another {number}")
    found = {row.server: row.generated for row in (await account(store.scripts)).rows if row.generated}
    assert found == {"(others)": 6}


async def test_rows_by_env_and_server_add_up(store: Ledger) -> None:
    await ready(store, 2)
    task, *_ = await issue(store, 3, server="r1", max_staleness=9)
    await store.deliver([replace(group(task.id, server="r1"), origin=Origin("r1", "words", 3))])
    found: Account = await account(store.scripts)
    assert [(row.env, row.server, row.ready) for row in found.rows] == [("digits", "r0", 6), ("words", "r1", 3)]
    assert found.total == Tokens(generated=9, ready=9)
    assert found.as_json()["total"] == found.total.as_json()


@pytest.mark.parametrize(
    ("filters", "kept", "lost"),
    [
        ([], 8, {}),
        ([{"name": "dynamic_sampling"}], 0, {"dynamic_sampling": 8}),
        ([{"name": "length", "min_tokens": 4}], 0, {"length": 8}),
        ([{"name": "pf_ppo", "strategy": "best_worst", "keep": 4}], 2, {"pf_ppo": 6}),
    ],
    ids=["none", "group", "answers", "drawn-four-times"],
)
def test_filters_lose_each_token_once(
    make_config: MakeConfig, filters: list[dict[str, Any]], kept: int, lost: dict[str, int]
) -> None:
    config: RunConfig = make_config(filters=filters)
    answers = [trajectory(episode=number, reward=1.0) for number in range(4)]
    delivered = m.Group(id="1", kind=m.TRAIN, epoch=0, indices=[0], trajectories=answers, unused={"baseline": 5})
    result = Inspector(config).admit(delivered, encode(delivered))
    facts: Facts = result.facts
    assert isinstance(result, Dropped) == (not kept)
    assert (facts.kept_tokens, dict(facts.lost)) == (kept, {"baseline": 5, **lost})
