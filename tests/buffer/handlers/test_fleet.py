"""A fleet is granted what its credits and the run allow, without asking the ledger about each server each time."""

from collections.abc import Callable

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
PART = 1
"""Slices of the held-out tasks that a server is granted each time."""


class FakeLedger:
    """Grants what is allowed, and remembers which servers it was asked about."""

    def __init__(self, *, allowed: dict[int, int]) -> None:
        self.allowed = allowed
        """Tickets, by the version of the server that wants them."""
        self.issued = 0
        self.asked: list[str] = []
        self.held: dict[str, int] = {}
        self.slices = 0
        """Of the held-out tasks, not handed out yet."""
        self.asked_for_slices: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None
        """What happens while the ledger is asked, once."""

    async def issue(self, server: str, *, server_version: int, credits: int, train_tasks: int) -> Issued:
        self.asked.append(server)
        self._something_happens()
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

    async def evaluate(self, version: int, *, server: str, eval_tasks: int) -> tuple[int, list[EvalSlice]]:
        self.asked_for_slices.append(server)
        self._something_happens()
        granted, self.slices = min(PART, self.slices), max(0, self.slices - PART)
        return self.slices, [EvalSlice(f"e{version}-{number}", 0, 1) for number in range(granted)]

    def _something_happens(self) -> None:
        happening, self.meanwhile = self.meanwhile, lambda: None
        happening()


class Stage:
    """Servers of these versions, and all tickets that were sent to them."""

    def __init__(self, config: RunConfig, ledger: FakeLedger, versions: dict[str, int]) -> None:
        self.ledger = ledger
        self.sent: dict[str, int] = dict.fromkeys(versions, 0)
        self.tickets: list[m.Ticket] = []
        self.eval_drained: list[tuple[bytes, int]] = []
        """Who was told that the evaluation of a version needs nothing more from it."""
        self.fleet = Fleet(config, ledger, self._send, MemoryGuard())  # type: ignore[arg-type]
        for name, version in versions.items():
            hello = m.ServerHello(
                run="run", env="digits", env_fingerprint="e1", train_tasks=TRAIN_TASKS, eval_tasks=100,
                tokenizer_fingerprint="t1", incarnation="i1",
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
        """Whom the ledger is asked about now."""
        self.ledger.asked.clear()
        await self.fleet.grant()
        return self.ledger.asked


async def test_satisfied_servers_wait_for_returned_ticket(config: RunConfig) -> None:
    fleet = Stage(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0})
    assert await fleet.asked() == ["a", "b"]
    assert fleet.sent == {"a": CREDITS, "b": CREDITS}
    assert await fleet.asked() == []
    fleet.ledger.held["b"] -= 1
    fleet.fleet.ticket_returned(b"b")
    fleet.fleet.ticket_returned(b"one that has left since")
    assert await fleet.asked() == ["b"]
    assert fleet.sent == {"a": CREDITS, "b": CREDITS + 1}


async def test_tickets_follow_task_order(config: RunConfig) -> None:
    seeded = config.model_copy(update={"run": config.run.model_copy(update={"seed": 3})})
    fleet = Stage(seeded, FakeLedger(allowed={0: 100}), dict.fromkeys("abcd", 0))
    await fleet.fleet.grant()
    orders = [task_order(TRAIN_TASKS, seed=3, epoch=epoch).tolist() for epoch in range(2)]
    assert orders[0] != orders[1]
    expected = [(epoch, [task]) for epoch, order in enumerate(orders) for task in order]
    assert [(ticket.epoch, ticket.indices) for ticket in fleet.tickets] == expected[: 4 * CREDITS]


async def test_exhausted_version_is_not_requested_again(config: RunConfig) -> None:
    fleet = Stage(config, FakeLedger(allowed={5: 3, 4: 100, 6: 1}), {"a": 5, "b": 5, "c": 5, "older": 4, "newer": 6})
    assert await fleet.asked() == ["a", "b", "newer"]
    assert fleet.sent == {"a": 2, "b": 1, "c": 0, "older": 0, "newer": 1}
    fleet.ledger.allowed[5] = 100
    assert await fleet.asked() == ["b", "c", "older", "newer"], "each time anew"


async def test_recheck_credits_covers_all_servers(config: RunConfig) -> None:
    fleet = Stage(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0})
    await fleet.asked()
    fleet.fleet.recheck_credits()
    assert await fleet.asked() == ["a", "b"]


async def test_silent_server_gets_nothing(config: RunConfig) -> None:
    fleet = Stage(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0})
    fleet.fleet.servers[b"a"].last_message_at = float("-inf")
    assert await fleet.asked() == ["b"]
    fleet.fleet.servers[b"a"].last_message_at = float("inf")
    assert await fleet.asked() == ["a"], "it was not forgotten: perhaps it could not be heard"


async def test_silent_servers_are_forgotten(config: RunConfig) -> None:
    fleet = Stage(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0, "c": 0})
    fleet.fleet.servers[b"a"].last_message_at = float("-inf")
    fleet.fleet.forget({"b"})
    assert list(fleet.fleet.servers) == [b"c"]


async def test_ticket_returned_during_grant_is_seen(config: RunConfig) -> None:
    fleet = Stage(config, FakeLedger(allowed={0: 100}), {"a": 0})
    fleet.ledger.meanwhile = lambda: fleet.fleet.ticket_returned(b"a")
    assert await fleet.asked() == ["a"]
    assert await fleet.asked() == ["a"], "it may have another one"
    assert await fleet.asked() == []


async def test_ticket_returned_during_grant_keeps_others(config: RunConfig) -> None:
    fleet = Stage(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0})
    fleet.ledger.meanwhile = lambda: fleet.fleet.ticket_returned(b"a")
    assert await fleet.asked() == ["a", "b"]


async def test_server_restarted_during_grant_is_distinct(config: RunConfig) -> None:
    fleet = Stage(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0})
    anew = Server(fleet.fleet.servers[b"b"].hello)
    fleet.ledger.meanwhile = lambda: fleet.fleet.servers.update({b"b": anew})
    assert await fleet.asked() == ["a"], "of the new one nobody knows what it wants"
    assert fleet.fleet.servers[b"b"] is anew


async def test_slices_returned_during_grant_are_seen(
    config: RunConfig,
) -> None:
    fleet = Stage(config, FakeLedger(allowed={0: 0}), {"a": 0})
    fleet.fleet.evaluating = 0
    fleet.ledger.slices = 1
    fleet.ledger.meanwhile = fleet.fleet.offer_evaluation
    await fleet.fleet.grant()
    assert fleet.sent == {"a": 1}
    fleet.ledger.slices = 1
    await fleet.fleet.grant()
    assert fleet.sent == {"a": 2}
    fleet.ledger.slices = 1
    await fleet.fleet.grant()
    assert fleet.sent == {"a": 2}, "it was told that nothing is left, and nothing came back since"


async def test_returned_slice_allows_another(
    config: RunConfig,
) -> None:
    fleet = Stage(config, FakeLedger(allowed={0: 0}), {"a": 0, "b": 0})
    fleet.fleet.evaluating = 0
    fleet.ledger.slices = 4
    for _ in range(3):
        await fleet.fleet.grant()
    assert fleet.sent == {"a": 1, "b": 1}
    assert fleet.ledger.asked_for_slices == ["a", "b"]
    fleet.fleet.ticket_returned(b"a")
    await fleet.fleet.grant()
    assert fleet.sent == {"a": 2, "b": 1}


async def test_eval_drained_is_sent_once(config: RunConfig) -> None:
    fleet = Stage(config, FakeLedger(allowed={0: 0, 1: 0, 2: 0}), {"older": 0, "under evaluation": 1, "newer": 2})
    fleet.fleet.evaluating = 1
    for _ in range(3):
        await fleet.fleet.grant()
    assert fleet.eval_drained == [(b"older", 0), (b"under evaluation", 1)]


@pytest.mark.parametrize("evaluating", [None, 0])
async def test_full_ledger_is_retried(config: RunConfig, evaluating: int | None) -> None:
    def full() -> None:
        raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'")

    fleet = Stage(config, FakeLedger(allowed={0: 100}), {"a": 0})
    fleet.fleet.evaluating = evaluating
    fleet.ledger.slices = 1
    fleet.ledger.meanwhile = full
    await fleet.fleet.grant()
    await fleet.fleet.grant()
    assert fleet.sent == {"a": CREDITS + (evaluating is not None)}


async def test_server_removed_during_grant_gets_nothing(
    config: RunConfig,
) -> None:
    fleet = Stage(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0})
    fleet.fleet.evaluating = 0
    fleet.ledger.slices = 100
    fleet.ledger.meanwhile = fleet.fleet.servers.clear
    await fleet.fleet.grant()
    assert fleet.sent["b"] == 0
    assert fleet.ledger.asked == []


@pytest.mark.parametrize(("credits", "granted", "free"), [(3, 3, 0), (8, 8, 0), (20, 8, 12)])
async def test_issue_returns_free_credits(store: Ledger, credits: int, granted: int, free: int) -> None:
    await store.join("r0", "first")
    found = await some(store, credits)
    assert (len(found.tasks), found.free) == (granted, free)
    assert (await some(store, credits)).free == free, "the same when there is nothing to grant"
    await deliver(store, [found.tasks[0].id])
    assert (await some(store, 0)).free == 0, "it holds more than its credits"


async def some(store: Ledger, credits: int) -> Issued:
    return await store.issue("r0", server_version=0, credits=credits, train_tasks=TRAIN_TASKS)


async def test_unknown_server_gets_nothing(redis: Redis, config: RunConfig) -> None:
    ledger = Ledger.from_config(redis, config)
    found = await ledger.issue("never heard of", server_version=0, credits=5, train_tasks=10)
    assert found == Issued([], 0)
