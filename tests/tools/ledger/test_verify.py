"""`slipstream ledger verify`: finds every kind of damage, and only that."""

from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis

from slipstream.buffer.store.keys import run_prefix, shard_prefix
from slipstream.configs import RunConfig
from tests.tools.ledger.conftest import MakeRun
from tests.tools.ledger.runs import SERVER, SOUND, CommandLine, on, play

Damage = Callable[[Redis, str], Awaitable[object]]


async def put_into_another_step(redis: Redis, prefix: str) -> None:
    """All that is recorded of group 4 agrees; only its step lacks a group now, and another has one too many."""
    await redis.delete(f"{prefix}:steps:4")
    await redis.rpush(f"{prefix}:steps:4", 0)
    await redis.zadd(f"{prefix}:trained", {"4": 0})


async def take_the_step_from_a_lease(redis: Redis, prefix: str) -> None:
    await redis.delete(f"{prefix}:lease:2", f"{prefix}:leases")


async def lose_a_group(redis: Redis, prefix: str) -> None:
    await redis.zrem(f"{prefix}:ready", "7")
    await redis.zrem(f"{prefix}:by_version", "7")


async def count_as_reissued(redis: Redis, prefix: str) -> None:
    await redis.hincrby(f"{prefix}:counters", "durable", -1)
    await redis.hincrby(f"{prefix}:counters", "reissued", 1)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "in two states": (lambda r, p: r.zadd(f"{p}:filtered", {"3": 0}), "group 3 is filtered and trained"),
    "another state": (lambda r, p: r.hset(f"{p}:about:3", "state", "ready"), "group 3 is trained, but says ready"),
    "in no state": (lose_a_group, "group 7 is in no state"),
    "bytes gone": (lambda r, p: r.delete(f"{p}:group:7"), "group 7 is ready, but not stored"),
    "bytes left": (lambda r, p: r.set(f"{p}:group:9", b"x"), "group 9 is filtered, but still stored"),
    "issued off by one": (
        lambda r, p: r.hincrby(f"{p}:counters", "issued", 1),
        "13 groups were issued, but there are ",
    ),
    "durable off by one": (lambda r, p: r.hincrby(f"{p}:counters", "durable", 1), " 3 durable "),
    "counted as another": (count_as_reissued, "2 groups are durable, but only 1 were counted"),
    "a drop without a reason": (
        lambda r, p: r.hincrby(f"{p}:counters", "filtered:reward_error", -1),
        "1 groups are filtered, 0 with a reason",
    ),
    "a task skipped": (
        lambda r, p: r.hincrby(f"{p}:meta", "position", 1),
        "12 tickets were issued for 13 tasks and 0 repetitions",
    ),
    "charged, not in flight": (
        lambda r, p: r.sadd(f"{p}:tickets_of:{SERVER}", "7"),
        f"server {SERVER} is charged for group 7, which is ready",
    ),
    "in flight, not charged": (
        lambda r, p: r.srem(f"{p}:tickets_of:{SERVER}", "10"),
        f"group 10 is issued to {SERVER}, which is not charged for it",
    ),
    "leased for no step": (take_the_step_from_a_lease, "group 5 is leased for no step"),
    "a lease that was left": (lambda r, p: r.zadd(f"{p}:leases", {"1": 1}), "step 1 has a lease of no groups"),
    "leased after training": (
        lambda r, p: r.zadd(f"{p}:lease:2", {"3": 9}),
        "group 3 is owed to step 2, but is trained",
    ),
    "not listed by version": (
        lambda r, p: r.zrem(f"{p}:by_version", "7"),
        "group 7 is ready, but not listed by its version",
    ),
    "a use not recorded": (
        lambda r, p: r.hset(f"{p}:about:3", "uses", 2),
        "group 3 is trained after 1 recorded steps",
    ),
    "used twice in a step": (lambda r, p: r.rpush(f"{p}:steps:3", 1), "group 3 was used twice in step 1"),
    "listed by another step": (
        lambda r, p: r.zadd(f"{p}:durable", {"1": 5}),
        "group 1 is listed as durable by another step than its last",
    ),
    "to be used again, but over": (
        lambda r, p: r.zadd(f"{p}:used", {"3": 1}),
        "group 3 is to be used again, but is trained",
    ),
    "used, but not listed as that": (
        lambda r, p: r.rpush(f"{p}:steps:7", 0),
        "group 7 is ready after 1 recorded steps",
    ),
    "a group that the rate limit forgot": (
        lambda r, p: r.hincrby(f"{p}:meta", "inserts", -1),
        "the rate limit counts 3 groups and 0 uses, but 4 with 0 are there",
    ),
    "uses that the rate limit kept": (
        lambda r, p: r.hincrby(f"{p}:meta", "samples", 2),
        "the rate limit counts 4 groups and 2 uses, but 4 with 0 are there",
    ),
    "a step with too few groups": (
        put_into_another_step,
        "step 1 was trained on 1 groups, but learner.groups_per_step=2",
    ),
    "a step with too many groups": (put_into_another_step, "step 0 was trained on 3 groups"),
}


def test_a_sound_ledger_is_one_line_that_adds_up(ledger: CommandLine, played: RunConfig) -> None:
    assert (ledger("verify", played.folder), ledger.out, ledger.err) == (0, SOUND, "")


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named(ledger: CommandLine, played: RunConfig, name: str) -> None:
    damage, sentence = DAMAGES[name]
    on(played, lambda redis, _: damage(redis, shard_prefix(played.run.name, 0)))
    assert ledger("verify", played.folder) == 1
    assert sentence in ledger.out
    assert "damaged" in ledger.err


def test_of_all_groups_the_one_that_is_lost_is_named(ledger: CommandLine, played: RunConfig) -> None:
    on(played, lambda redis, _: lose_a_group(redis, shard_prefix(played.run.name, 0)))
    assert ledger("verify", played.folder) == 1
    assert [line for line in ledger.out.splitlines() if "in no state" in line] == ["group 7 is in no state"]


def test_several_shards_are_sound_together(ledger: CommandLine, make_run: MakeRun) -> None:
    config = make_run(shards=2)
    on(config, lambda redis, opened: play(redis, opened, config))
    assert (ledger("verify", config.folder), ledger.out) == (0, SOUND)


def test_a_step_that_one_shard_gave_too_little_is_named_with_the_shard(ledger: CommandLine, make_run: MakeRun) -> None:
    config = make_run(shards=2)
    on(config, lambda redis, opened: play(redis, opened, config))

    async def move(redis: Redis, _: object) -> None:
        prefix = shard_prefix(config.run.name, 1)
        # The first group of the second shard.
        await redis.delete(f"{prefix}:steps:3")
        await redis.rpush(f"{prefix}:steps:3", 1)
        await redis.zadd(f"{prefix}:durable", {"3": 1})

    on(config, move)
    assert ledger("verify", config.folder) == 1
    assert "step 0 was trained on 0 groups in shard 1, but learner.groups_per_step=2, 1 of them in each" in ledger.out
    assert "in shard 0" not in ledger.out


def test_steps_that_retention_forgot_are_said_not_to_be_checked_and_later_ones_still_are(
    ledger: CommandLine, make_run: MakeRun
) -> None:
    config = make_run(retention={"max_groups": 0})
    on(config, lambda redis, opened: play(redis, opened, config))
    on(config, lambda _, opened: opened.sweep(silent_s=None))
    assert ledger("verify", config.folder) == 0
    assert ledger.out.startswith(SOUND)
    assert "not checked: how many groups each step up to 0 had" in ledger.out
    on(config, lambda redis, _: put_into_another_step(redis, shard_prefix(config.run.name, 0)))
    assert ledger("verify", config.folder) == 1
    assert "step 1 was trained on 1 groups" in ledger.out
    assert "step 0" not in ledger.out


def test_words_that_peers_chose_reach_no_terminal_as_commands(ledger: CommandLine, played: RunConfig) -> None:
    prefix = shard_prefix(played.run.name, 0)
    on(played, lambda redis, _: redis.hset(f"{prefix}:about:10", "server", "\x1b[2Jr9"))
    assert ledger("verify", played.folder) == 1
    assert "group 10 is issued to \\x1b[2Jr9" in ledger.out


async def contents(redis: Redis, run: str) -> dict[bytes, bytes | None]:
    """Every key of the run and what it holds."""
    return {key: await redis.dump(key) async for key in redis.scan_iter(match=f"{run_prefix(run)}*")}


@pytest.mark.parametrize("arguments", [("verify", "RUN"), ("show", "--run", "RUN"), ("show", "7", "--run", "RUN")])
def test_looking_changes_nothing(ledger: CommandLine, played: RunConfig, arguments: tuple[str, ...]) -> None:
    before = on(played, lambda redis, _: contents(redis, played.run.name))
    assert ledger(*(str(played.folder) if each == "RUN" else each for each in arguments)) == 0
    assert before
    assert on(played, lambda redis, _: contents(redis, played.run.name)) == before
