"""Tickets for a fleet of servers: what credits and the run allow, with few requests to the ledger."""

from collections.abc import Callable

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from slipstream.buffer.handlers.fleet import Fleet, Server
from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import MemoryGuard
from slipstream.buffer.store.types import EvalSlice, Issued, IssuedTask
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from tests.buffer.ledger import TRAIN_TASKS, deliver

CREDITS = 2
FLEET = [f"r{number}" for number in range(256)]
PART = 1
"""Slices per request."""


class FakeLedger:
    """A ledger that grants what is allowed and records the servers of its requests."""

    def __init__(self, *, allowed: dict[int, int]) -> None:
        self.allowed = allowed
        """Tickets by server version."""
        self.issued = 0
        self.asked: list[str] = []
        self.held: dict[str, int] = {}
        self.slices = 0
        """Slices of the held-out tasks that are not issued."""
        self.asked_for_slices: list[str] = []
        self.shares: dict[str, int] = {}
        self.during: Callable[[], None] = lambda: None
        """Called once, in the next request."""

    async def issue(self, server: str, *, server_version: int, credits: int, train_tasks: int) -> Issued:
        self.asked.append(server)
        self._run_during()
        held = self.held.get(server, 0)
        granted = min(credits - held, self.allowed[server_version])
        self.allowed[server_version] -= granted
        self.held[server] = held + granted
        tasks = [
            IssuedTask(str(number), *divmod(number, train_tasks))
            for number in range(self.issued, self.issued + granted)
        ]
        self.issued += granted
        return Issued(tasks, credits - held - granted)

    async def evaluate(self, version: int, *, server: str, eval_tasks: int, share: int) -> tuple[int, list[EvalSlice]]:
        self.shares[server] = share
        self.asked_for_slices.append(server)
        self._run_during()
        granted, self.slices = min(PART, self.slices), max(0, self.slices - PART)
        return self.slices, [EvalSlice(f"e{version}-{number}", 0, 1) for number in range(granted)]

    def _run_during(self) -> None:
        during, self.during = self.during, lambda: None
        during()


class Harness:
    """Servers of these versions, and what was sent to them."""

    def __init__(self, config: RunConfig, ledger: FakeLedger, versions: dict[str, int]) -> None:
        self.ledger = ledger
        self.sent: dict[str, int] = dict.fromkeys(versions, 0)
        self.tickets: list[m.Ticket] = []
        self.eval_drained: list[tuple[bytes, int]] = []
        self.fleet = Fleet(config, ledger, self._send, MemoryGuard())  # type: ignore[arg-type]
        for name, version in versions.items():
            hello = m.ServerHello(
                run="run", env="digits", env_fingerprint="e1", train_tasks=TRAIN_TASKS, eval_tasks=100,
                tokenizer_fingerprint="t1", vocab_size=32, incarnation="i1",
            )  # fmt: skip
            credits = m.Credits(capacity=CREDITS, status=m.ServerStatus(server=name, version=version), held=[])
            self.fleet.servers[name.encode()] = Server(hello, credits, last_message_at=float("inf"))

    async def _send(self, peer: bytes, message: m.Message) -> None:
        if isinstance(message, m.Tickets):
            self.sent[peer.decode()] += len(message.tickets)
            self.tickets += message.tickets
        elif isinstance(message, m.EvalDrained):
            self.eval_drained.append((peer, message.version))

    async def asked(self) -> list[str]:
        """Servers of the requests of one grant."""
        self.ledger.asked.clear()
        await self.fleet.grant()
        return self.ledger.asked


async def test_satisfied_servers_wait_for_returned_ticket(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0})
    assert await harness.asked() == ["a", "b"]
    assert harness.sent == {"a": CREDITS, "b": CREDITS}
    assert await harness.asked() == []
    harness.ledger.held["b"] -= 1
    harness.fleet.ticket_returned(b"b")
    harness.fleet.ticket_returned(b"left")
    assert await harness.asked() == ["b"]
    assert harness.sent == {"a": CREDITS, "b": CREDITS + 1}


async def test_tickets_follow_task_order(config: RunConfig) -> None:
    seeded = config.model_copy(update={"run": config.run.model_copy(update={"seed": 3})})
    harness = Harness(seeded, FakeLedger(allowed={0: 100}), dict.fromkeys("abcd", 0))
    await harness.fleet.grant()
    orders = [task_order(TRAIN_TASKS, seed=3, epoch=epoch).tolist() for epoch in range(2)]
    assert orders[0] != orders[1]
    expected = [(epoch, [task]) for epoch, order in enumerate(orders) for task in order]
    assert [(ticket.epoch, ticket.indices) for ticket in harness.tickets] == expected[: 4 * CREDITS]


async def test_exhausted_version_is_not_requested_again(config: RunConfig) -> None:
    versions = {"a": 5, "b": 5, "c": 5, "older": 4, "newer": 6}
    harness = Harness(config, FakeLedger(allowed={5: 3, 4: 100, 6: 1}), versions)
    assert await harness.asked() == ["a", "b", "newer"]
    assert harness.sent == {"a": 2, "b": 1, "c": 0, "older": 0, "newer": 1}
    harness.ledger.allowed[5] = 100
    assert await harness.asked() == ["b", "c", "older", "newer"]


async def test_silent_server_gets_nothing(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0})
    harness.fleet.servers[b"a"].last_message_at = float("-inf")
    assert await harness.asked() == ["b"]
    harness.fleet.servers[b"a"].last_message_at = float("inf")
    assert await harness.asked() == ["a"], "it was not removed"


async def test_silent_servers_are_forgotten(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0, "c": 0})
    harness.fleet.servers[b"a"].last_message_at = float("-inf")
    harness.fleet.forget({"b"})
    assert list(harness.fleet.servers) == [b"c"]


async def test_ticket_returned_during_grant_is_seen(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0})
    harness.ledger.during = lambda: harness.fleet.ticket_returned(b"a")
    assert await harness.asked() == ["a", "b"]
    assert await harness.asked() == ["a"]
    assert await harness.asked() == []
    harness.fleet.recheck_credits()
    assert await harness.asked() == ["a", "b"]


async def test_server_restarted_during_grant_is_distinct(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0})
    anew = Server(harness.fleet.servers[b"b"].hello)
    harness.ledger.during = lambda: harness.fleet.servers.update({b"b": anew})
    assert await harness.asked() == ["a"], "the new process has no credits yet"
    assert harness.fleet.servers[b"b"] is anew


async def test_slices_returned_during_grant_are_seen(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 0}), {"a": 0})
    harness.fleet.evaluating = 0
    harness.ledger.during = harness.fleet.offer_evaluation
    for sent in (1, 2, 2):  # the second grant sends EvalDrained, and no slice comes back after it
        harness.ledger.slices = 1
        await harness.fleet.grant()
        assert harness.sent == {"a": sent}


async def test_returned_slice_allows_another(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 0}), {"a": 0, "b": 0})
    harness.fleet.evaluating = 0
    harness.ledger.slices = 4
    for _ in range(3):
        await harness.fleet.grant()
    assert harness.sent == {"a": 1, "b": 1}
    assert harness.ledger.asked_for_slices == ["a", "b"]
    harness.fleet.ticket_returned(b"a")
    await harness.fleet.grant()
    assert harness.sent == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("tasks", "credits", "shares"),
    [
        (100, {"a": 8, "b": 8}, {"a": 16, "b": 16}),
        (11, {"a": 8, "b": 8}, {"a": 5, "b": 6}),
        (10, {"a": 12, "b": 4}, {"a": 7, "b": 3}),
        (10, {"a": 8, "b": 0}, {"a": 10}),
        (10, {"a": 8, "b": 8, "newer": 8, "silent": 8}, {"a": 5, "b": 5}),
        (2, dict.fromkeys("abcd", 8), dict.fromkeys("abcd", 1)),
        (100, dict.fromkeys(FLEET, 8), dict.fromkeys(FLEET, 1)),
    ],
    ids=["played at once", "even", "by credits", "engine restarts", "others do not count", "few tasks", "large fleet"],
)
async def test_servers_share_held_out_tasks(
    config: RunConfig, tasks: int, credits: dict[str, int], shares: dict[str, int]
) -> None:
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"tasks": tasks})})
    harness = Harness(config, FakeLedger(allowed={0: 0, 1: 0}), {name: int(name == "newer") for name in credits})
    for name, capacity in credits.items():
        server = harness.fleet.servers[name.encode()]
        assert server.credits is not None
        server.credits = msgspec.structs.replace(server.credits, capacity=capacity)
        if name == "silent":
            server.last_message_at = float("-inf")
    harness.fleet.evaluating = 0
    await harness.fleet.grant()
    assert harness.ledger.shares == shares


async def test_eval_drained_is_sent_once(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 0, 1: 0, 2: 0}), {"older": 0, "under evaluation": 1, "newer": 2})
    harness.fleet.evaluating = 1
    for _ in range(3):
        await harness.fleet.grant()
    assert harness.eval_drained == [(b"older", 0), (b"under evaluation", 1)]


@pytest.mark.parametrize("evaluating", [None, 0])
async def test_full_ledger_is_retried(config: RunConfig, evaluating: int | None) -> None:
    def full() -> None:
        raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'")

    harness = Harness(config, FakeLedger(allowed={0: 100}), {"a": 0})
    harness.fleet.evaluating = evaluating
    harness.ledger.slices = 1
    harness.ledger.during = full
    await harness.fleet.grant()
    await harness.fleet.grant()
    assert harness.sent == {"a": CREDITS + (evaluating is not None)}


async def test_server_removed_during_grant_gets_nothing(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0})
    harness.fleet.evaluating = 0
    harness.ledger.slices = 100
    harness.ledger.during = harness.fleet.servers.clear
    await harness.fleet.grant()
    assert harness.sent["b"] == 0
    assert harness.ledger.asked == []


@pytest.mark.parametrize(("credits", "granted", "free"), [(3, 3, 0), (8, 8, 0), (20, 8, 12)])
async def test_issue_returns_free_credits(store: Ledger, credits: int, granted: int, free: int) -> None:
    await store.join("r0", "first")
    found = await issue(store, credits)
    assert (len(found.tasks), found.free) == (granted, free)
    assert (await issue(store, credits)).free == free
    await deliver(store, [found.tasks[0].id])
    assert (await issue(store, 0)).free == 0, "it holds more than its credits"


async def issue(store: Ledger, credits: int) -> Issued:
    return await store.issue("r0", server_version=0, credits=credits, train_tasks=TRAIN_TASKS)


async def test_unknown_server_gets_nothing(redis: Redis, config: RunConfig) -> None:
    ledger = Ledger.from_config(redis, config)
    found = await ledger.issue("unknown", server_version=0, credits=5, train_tasks=10)
    assert found == Issued([], 0)
