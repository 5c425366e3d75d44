"""`slipstream ledger verify` and `show`."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import run_prefix
from slipstream.buffer.store.types import EvalSlice, Facts
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from slipstream.models.folder import initial_model
from tests.buffer.groups import train_group
from tests.tools.conftest import CommandLine
from tests.tools.ledger.conftest import SERVER, SOUND, TASKS, MakeRun, delivered, on, play, spill, start


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def cells(printed: str) -> list[list[str]]:
    """The rows of all tables."""
    return [
        [cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in printed.splitlines() if line[:1] in "│┃"
    ]


# --- verify -----------------------------------------------------------------------------------------------------------


Damage = Sequence[tuple[str, str, *tuple[Any, ...]]]
"""Commands to Redis: name, key below the run's prefix, arguments."""

LOST_GROUP: Damage = [("zrem", "ready", "7"), ("zrem", "by_version", "7")]
# All records of group 4 agree, but its step has a group too few, and another one too many.
OTHER_STEP: Damage = [("delete", "steps:4"), ("rpush", "steps:4", 0), ("zadd", "trained", {"4": 0})]
COUNTED_REISSUED: Damage = [("hincrby", "counters", "durable", -1), ("hincrby", "counters", "reissued", 1)]
DAMAGES: list[tuple[Damage, str]] = [  # with parts of the problem that is reported
    ([("zadd", "filtered", {"3": 0})], "group 3, filtered, trained"),
    ([("hset", "about:3", "state", "ready")], "group 3, trained, ready"),
    (LOST_GROUP, "group 7, no state"),
    ([("delete", "group:7")], "group 7, ready, not stored"),
    ([("set", "group:9", b"x")], "group 9, filtered, stored"),
    ([("hincrby", "counters", "issued", 1)], "13 groups, issued"),
    ([("hincrby", "counters", "durable", 1)], "3 durable"),
    (COUNTED_REISSUED, "2 groups, durable, 1, counted"),
    ([("hincrby", "counters", "filtered:reward_error", -1)], "1 groups, filtered, 0, reason"),
    ([("hincrby", "meta", "position", 1)], "12 tickets, 13 tasks, 0 repetitions"),
    ([("hincrby", "counters", "skipped_tasks", 2)], "12 tickets, 10 tasks, 0 repetitions, 2 tasks, skipped"),
    ([("sadd", f"tickets_of:{SERVER}", "7")], f"server {SERVER}, group 7, ready"),
    ([("srem", f"tickets_of:{SERVER}", "10")], f"group 10, issued to {SERVER}, not count"),
    ([("delete", "lease:2"), ("delete", "leases")], "group 5, leased, no step"),
    ([("zadd", "leases", {"1": 1})], "step 1, lease, no groups"),
    ([("zadd", "lease:2", {"3": 9})], "group 3, step 2, trained"),
    ([("zrem", "by_version", "7")], "group 7, ready, version"),
    ([("hset", "about:3", "uses", 2)], "group 3, trained, 1 recorded"),
    ([("rpush", "steps:3", 1)], "group 3, twice, step 1"),
    ([("zadd", "durable", {"1": 5})], "group 1, durable, another step"),
    ([("zadd", "used", {"3": 1})], "group 3, used again, trained"),
    ([("rpush", "steps:7", 0)], "group 7, ready, 1 recorded"),
    ([("hincrby", "meta", "inserts", -1)], "rate limit, 3 groups, 0 uses, 4 with 0"),
    ([("hincrby", "meta", "samples", 2)], "rate limit, 4 groups, 2 uses, 4 with 0"),
    (OTHER_STEP, "step 1, 1 groups, learner.groups_per_step=2"),
    (OTHER_STEP, "step 0, 3 groups"),
]


def damage(run: RunConfig, commands: Damage) -> None:
    async def work(redis: Redis, _: object) -> None:
        for name, key, *arguments in commands:
            await getattr(redis, name)(f"{run_prefix(run.run.name)}:{key}", *arguments)

    on(run, work)


def test_sound_ledger_is_one_sum(ledger: CommandLine, played: RunConfig) -> None:
    assert (ledger("verify", played.paths.root), ledger.out, ledger.err) == (0, SOUND, "")


@pytest.mark.parametrize(("commands", "problem"), DAMAGES, ids=[problem for _, problem in DAMAGES])
def test_damage_is_named(ledger: CommandLine, played: RunConfig, commands: Damage, problem: str) -> None:
    damage(played, commands)
    assert ledger("verify", played.paths.root) == 1
    assert any(all(part in line for part in problem.split(", ")) for line in ledger.out.splitlines())
    assert [line for line in ledger.out.splitlines() if "no state" in line and "group 7 " not in line] == []
    assert played.run.name in ledger.err


def test_forgotten_steps_are_not_checked(ledger: CommandLine, make_run: MakeRun) -> None:
    config = make_run(retention={"max_groups": 0})
    play(config)
    on(config, lambda _, opened: opened.trim())
    assert ledger("verify", config.paths.root) == 0
    assert ledger.out.startswith(SOUND)
    assert "step up to 0" in ledger.out
    damage(config, OTHER_STEP)
    assert ledger("verify", config.paths.root) == 1
    assert "step 1 " in ledger.out
    assert "step 0" not in ledger.out


async def contents(redis: Redis, run: str) -> dict[bytes, bytes | None]:
    """Every key of the run with its value."""
    return {key: await redis.dump(key) async for key in redis.scan_iter(match=f"{run_prefix(run)}*")}


@pytest.mark.parametrize("arguments", [("verify", "RUN"), ("show", "RUN"), ("show", "RUN", "7")])
def test_inspection_changes_nothing(ledger: CommandLine, played: RunConfig, arguments: tuple[str, ...]) -> None:
    before = on(played, lambda redis, _: contents(redis, played.run.name))
    assert ledger(*(str(played.paths.root) if each == "RUN" else each for each in arguments)) == 0
    assert before
    assert on(played, lambda redis, _: contents(redis, played.run.name)) == before


def test_names_of_peers_are_escaped(ledger: CommandLine, played: RunConfig) -> None:
    damage(played, [("hset", "about:10", "server", "\x1b[2J[bold]r9")])
    assert ledger("show", played.paths.root, "10") == 0
    assert ["server", "\\x1b[2J[bold]r9"] in cells(ledger.out)
    assert ledger("verify", played.paths.root) == 1
    assert "\\x1b[2J[bold]r9" in ledger.out


# --- show -------------------------------------------------------------------------------------------------------------


def set_history(run: RunConfig, *events: str) -> None:
    """Replaces the history of group 10."""
    damage(run, [("delete", "history:10"), ("rpush", "history:10", *events)])


def test_group_is_shown_from_ticket_to_checkpoint(ledger: CommandLine, played: RunConfig) -> None:
    assert ledger("show", played.paths.root, "1") == 0
    index = task_order(TASKS, seed=played.run.seed, epoch=0)[0]
    assert "group 1: durable" in ledger.out
    found = cells(ledger.out)
    for row in (
        ["task", f"epoch 0, position 0: index {index}"],
        ["server", SERVER],
        ["policy version", "0 when it was issued, 0 the oldest of its tokens"],
        ["answers", "2 of 2 tokens"],
        ["trained in", "step 0"],
        ["1", "2", "stop", "0: 2 to 3", "exact_match 1"],
        ["0", "2", "stop", "0: 2 to 3", "exact_match 0"],
    ):
        assert row in found
    events = [row for row in found if row[0].endswith("UTC")]
    assert [state for _, _, state, _ in events] == ["issued", "ready", "leased", "trained", "durable"]
    assert events[0][1] == "+0.000 s"
    assert [row[0] for row in events] == sorted(row[0] for row in events)


def test_group_is_shown_as_text_where_the_tokenizer_is(ledger: CommandLine, played: RunConfig) -> None:
    assert ledger("show", played.paths.root, "1") == 0
    assert "tokenizer.json" in ledger.out
    initial_model(played)
    assert ledger("show", played.paths.root, "1") == 0
    answers = ledger.out.partition("answer 0, reward")[2]
    assert "prompt (2 tokens)" in answers
    assert "action (2 tokens, version 0)" in answers


def test_times_are_absolute_and_since_issue(ledger: CommandLine, played: RunConfig) -> None:
    set_history(played, "86399.250000 issued to r0", "90000.500000 ready oldest version 0")
    assert ledger("show", played.paths.root, "10") == 0
    found = cells(ledger.out)
    assert ["1970-01-01 23:59:59.250 UTC", "+0.000 s", "issued", "to r0"] in found
    assert ["1970-01-02 01:00:00.500 UTC", "+3601.250 s", "ready", "oldest version 0"] in found


@pytest.mark.parametrize("columns", ["20", "80"])
def test_narrow_terminal_truncates_nothing(
    ledger: CommandLine, played: RunConfig, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    server = "rollout-pod-" + "0123456789" * 8
    set_history(played, f"86399.250000 issued to {server}")
    assert ledger("show", played.paths.root, "10") == 0
    assert "1970-01-01 23:59:59.250 UTC" in ledger.out
    assert server in "".join(row[-1] for row in cells(ledger.out))
    assert ledger("show", played.paths.root) == 0
    assert "…" not in ledger.out


def test_spilled_groups_are_verified_and_shown(ledger: CommandLine, played: RunConfig) -> None:
    (file,) = spill(played)
    assert ledger("verify", played.paths.root) == 0
    assert ledger.out.startswith(SOUND)
    assert ledger("show", played.paths.root, "1") == 0
    assert "2 answers to task" in ledger.out
    assert file.name in ledger.out
    file.write_bytes(b"damaged")
    assert ledger("verify", played.paths.root) == 1
    assert len(ledger.out.splitlines()) == 4
    assert ledger("show", played.paths.root, "1") == 0
    assert "2 answers to task" not in ledger.out


def test_filtered_group_shows_the_reason(ledger: CommandLine, played: RunConfig) -> None:
    assert ledger("show", played.paths.root, "9") == 0
    assert "group 9: filtered" in ledger.out
    assert cells(ledger.out)[-1][2:] == ["filtered", "reward_error"]


def test_evaluation_shows_its_answers(ledger: CommandLine, played: RunConfig) -> None:
    async def evaluate(_: object, opened: Ledger) -> str:
        await opened.publish(0, evaluate=True)
        await opened.evaluations.grant(0, server=SERVER, eval_tasks=1, share=1)
        blob = encode(train_group("e0-0", index=7))
        return await opened.evaluations.record(
            EvalSlice("e0-0", 0, 1), version=0, failures={}, tallies={"score": (1.0, 1.0)}, blob=blob
        )

    assert on(played, evaluate) == "evaluated"
    assert ledger("show", played.paths.root, "e0-0") == 0
    assert "2 answers to task 7" in ledger.out


@pytest.mark.parametrize("group_id", ["13", "0", "nonsense", "e9-0"])
def test_unknown_group_is_an_error(ledger: CommandLine, played: RunConfig, group_id: str) -> None:
    assert ledger("show", played.paths.root, group_id) == 1
    assert f"'{group_id}'" in ledger.err


def test_run_is_a_name_or_a_folder(ledger: CommandLine, played: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(played.paths.root.parent.parent)
    for run in (played.paths.root, f"runs/{played.run.name}", played.run.name):
        assert ledger("show", run, "1") == 0
        assert "group 1: durable" in ledger.out


def test_forgotten_group_is_distinguished_from_unknown(ledger: CommandLine, make_run: MakeRun) -> None:
    config = make_run(retention={"max_groups": 0})
    play(config)
    on(config, lambda _, opened: opened.trim())
    assert ledger("show", config.paths.root, "2") == 1
    assert "buffer.retention" in ledger.err


def test_report_counts_states_reasons_lengths_and_outcomes(ledger: CommandLine, make_run: MakeRun) -> None:
    config = make_run(filters=[{"name": "dynamic_sampling"}])

    async def drop(_: object, opened: Ledger) -> None:
        tasks = await start(opened, config)
        await opened.deliver([delivered(config, task) for task in tasks[:2]])
        assert await opened.lease(0, consuming_version=0, count=2) is not None
        await opened.train(0)
        facts = Facts(tokens=8, delivered={4: 2}, dropped={"dynamic_sampling": {4: 2}}, task=3, outcome="solved")
        await opened.filter(tasks[2].id, reason="dynamic_sampling", facts=facts)

    on(config, drop)
    assert ledger("show", config.paths.root) == 0
    found = cells(ledger.out)
    for row in (
        ["issued", "9", "12 11 10 9 8"],
        ["trained", "2", "2 1"],
        ["filtered", "1", "3"],
        ["filtered:dynamic_sampling", "1"],
        # Of six answers four have 2 tokens and two have 4: the trained ones are all short, the dropped all long.
        ["trained", "4", "0.333"],
        ["dropped: dynamic_sampling", "2", "0.667"],
        ["mixed", "2", "67%"],
        ["solved", "1", "33%"],
    ):
        assert row in found
    assert f"run {config.run.name}: 12 groups" in ledger.out
