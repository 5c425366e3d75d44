"""Tickets for a fleet of servers: what credits and the run allow, with few requests to the ledger."""

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import pytest
from redis.exceptions import OutOfMemoryError

from slipstream.buffer.handlers.fleet import GRACE_S, Fleet
from slipstream.buffer.policies.curriculum import Place
from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import MemoryGuard
from slipstream.buffer.store.types import EvalSlice, IssuedTask, Room, TicketRequest
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from tests.buffer.ledger import TRAIN_TASKS

CREDITS = 2
FLEET = [f"r{number}" for number in range(256)]
PART = 1
"""Slices per request."""


class FakeLedger:
    """A ledger that grants what is allowed and records its requests; its evaluations too."""

    def __init__(self, *, allowed: dict[int, int], version: int = 0) -> None:
        self.evaluations = self
        self.allowed = allowed
        """Tickets by server version."""
        self.version = version
        self.issued = 0
        self.asked: list[str] = []
        """Servers of the last request for room."""
        self.held: dict[str, int] = {}
        self.heartbeats: list[dict[str, list[str]]] = []
        self.graces_s: list[float] = []
        self.slices = 0
        """Slices of the held-out tasks that are not issued."""
        self.asked_for_slices: list[str] = []
        self.shares: dict[str, int] = {}
        self.during: Callable[[], object] = lambda: None
        """Called once, in the next request."""

    async def heartbeat(
        self, held: dict[str, list[str]], *, sampled: dict[str, m.Sampled], grace_s: float
    ) -> dict[str, int]:
        self.heartbeats.append(held)
        self.graces_s.append(grace_s)
        return {}

    async def resumable(self) -> int:
        return 0

    async def room(self, servers: list[str], versions: list[int]) -> Room:
        self.asked = servers
        self._run_during()
        allowed = {version: self.allowed[version] for version in versions}
        held = {server: self.held.get(server, 0) for server in servers} if max(allowed.values()) else {}
        return Room(self.version, allowed, held, cursor=(0, 0))

    async def issue(
        self, requests: list[TicketRequest], *, train_tasks: int, skip: Sequence[Place]
    ) -> list[list[IssuedTask]]:
        assert not skip
        found = []
        for request in requests:
            granted = min(
                request.tickets, request.credits - self.held.get(request.server, 0), self.allowed[request.version]
            )
            self.allowed = {version: max(0, left - granted) for version, left in self.allowed.items()}
            self.held[request.server] = self.held.get(request.server, 0) + granted
            numbers = range(self.issued, self.issued + granted)
            found.append([IssuedTask(str(number), *divmod(number, train_tasks)) for number in numbers])
            self.issued += granted
        return found

    async def grant(self, version: int, *, server: str, eval_tasks: int, share: int) -> tuple[int, list[EvalSlice]]:
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

    def __init__(
        self, config: RunConfig, ledger: FakeLedger, versions: Mapping[str, int | None], *, capacity: int = 10**6
    ) -> None:
        self.ledger = ledger
        self.sent: dict[str, int] = dict.fromkeys(versions, 0)
        self.tickets: list[m.Ticket] = []
        self.eval_drained: list[tuple[bytes, int]] = []
        learner = config.learner.model_copy(update={"groups_per_step": capacity})
        buffer = config.buffer.model_copy(update={"max_staleness": 0})
        self.config = config.model_copy(update={"learner": learner, "buffer": buffer})
        self.fleet = Fleet(self.config, ledger, self._send, MemoryGuard())  # type: ignore[arg-type]
        for name, version in versions.items():
            self.join(name, version)

    def join(self, name: str, version: int | None, *, credits: int = CREDITS) -> None:
        """A server joins; version None: it has not reported its credits."""
        hello = m.ServerHello(
            run="run", env="digits", env_fingerprint="e1", train_tasks=TRAIN_TASKS, eval_tasks=100,
            tokenizer_fingerprint="t1", vocab_size=99, incarnation="i1",
        )  # fmt: skip
        self.fleet.join(name.encode(), hello)
        self.fleet.servers[name.encode()].last_message_at = float("inf")
        if version is not None:
            self.report(name, version, credits=credits)

    def report(
        self, name: str, version: int, *, credits: int = CREDITS, up_s: float = 0.0, now: float | None = None
    ) -> None:
        status = m.ServerStatus(server=name, version=version, up_s=up_s)
        report = m.Credits(capacity=credits, status=status, held=[])
        self.fleet.servers[name.encode()].report(report, now=time.monotonic() if now is None else now)

    async def _send(self, peer: bytes, message: m.Message) -> None:
        if isinstance(message, m.Tickets):
            self.sent[peer.decode()] = self.sent.get(peer.decode(), 0) + len(message.tickets)
            self.tickets += message.tickets
        elif isinstance(message, m.EvalDrained):
            self.eval_drained.append((peer, message.version))

    async def asked(self) -> list[str]:
        """Servers that one grant asks for room for."""
        self.ledger.asked = []
        await self.fleet.grant()
        return self.ledger.asked


async def test_servers_that_leave_during_a_grant_get_nothing(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0})
    harness.ledger.during = lambda: harness.fleet.servers.pop(b"a") and None
    assert await harness.asked() == ["a", "b"]
    assert harness.sent == {"a": 0, "b": CREDITS}
    harness.report("b", 0, credits=2 * CREDITS)
    harness.ledger.during = harness.fleet.servers.clear
    assert await harness.asked() == ["b"]
    assert harness.sent["b"] == CREDITS


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


async def test_heartbeats_are_recorded_once(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 0}), {"a": 0, "b": 0, "silent": None})
    for _ in range(2):
        await harness.fleet.grant()
    harness.report("b", 0)
    await harness.fleet.grant()
    assert harness.ledger.heartbeats == [{"a": [], "b": []}, {"b": []}]


async def test_delayed_heartbeats_extend_grace(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 0}), {"a": None, "b": 0})
    for up_s, now in ((10.0, 110.0), (11.0, 111.5), (12.0, 119.0), (20.0, 120.0)):
        harness.report("a", 0, up_s=up_s, now=now)
        await harness.fleet.grant()
    assert harness.ledger.graces_s == pytest.approx([GRACE_S, GRACE_S + 0.5, GRACE_S + 7.0, GRACE_S])


async def test_tickets_follow_task_order(config: RunConfig) -> None:
    seeded = config.model_copy(update={"run": config.run.model_copy(update={"seed": 3})})
    harness = Harness(seeded, FakeLedger(allowed={0: 100}), dict.fromkeys("abcd", 0))
    await harness.fleet.grant()
    orders = [task_order(TRAIN_TASKS, seed=3, epoch=epoch).tolist() for epoch in range(2)]
    assert orders[0] != orders[1]
    expected = [(epoch, [task]) for epoch, order in enumerate(orders) for task in order]
    assert [(ticket.epoch, ticket.indices) for ticket in harness.tickets] == expected[: 4 * CREDITS]


async def test_room_rotates_among_equal_servers(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 0}), dict.fromkeys("abcde", 0))
    for _ in range(5):
        harness.ledger.allowed[0] = 2
        await harness.fleet.grant()
        harness.ledger.held.clear()
    assert set(harness.sent.values()) == {2}


@pytest.mark.parametrize(("reserved_s", "sent"), [(1e6, {"a": 2, "b": 0, "new": 0}), (0.0, {"a": 4, "b": 0, "new": 0})])
async def test_shares_are_reserved_for_a_while(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, reserved_s: float, sent: dict[str, int]
) -> None:
    """`b` installs the latest version, `new` has not reported yet."""
    monkeypatch.setattr("slipstream.buffer.handlers.fleet.RESERVED_S", reserved_s)
    harness = Harness(config, FakeLedger(allowed={6: 5, 5: 0}, version=6), {"b": 5, "new": None})
    harness.join("a", 6, credits=4)
    for _ in range(3):  # further grants give it no more than its share
        await harness.fleet.grant()
    assert harness.sent == sent


async def test_exhausted_version_gets_nothing(config: RunConfig) -> None:
    versions = {"a": 5, "b": 5, "older": 3, "newer": 6}
    harness = Harness(config, FakeLedger(allowed={5: 3, 3: 0, 6: 5}, version=6), versions)
    harness.fleet.servers[b"older"].version_since = float("-inf")
    await harness.fleet.grant()
    assert harness.sent == {"a": 1, "b": 1, "older": 0, "newer": 2}


async def test_silent_server_gets_nothing_and_is_forgotten(config: RunConfig) -> None:
    harness = Harness(config, FakeLedger(allowed={0: 100}), {"a": 0, "b": 0, "c": 0})
    harness.fleet.servers[b"a"].last_message_at = float("-inf")
    assert await harness.asked() == ["b", "c"]
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
    harness.ledger.during = lambda: harness.join("b", None)
    await harness.fleet.grant()
    assert harness.fleet.servers[b"b"].credits is None
    assert await harness.asked() == [], "the new process has no credits yet"


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
        (100, {"a": 8, "b": 8}, {"a": 16, "b": 16}), (11, {"a": 8, "b": 8}, {"a": 5, "b": 6}),
        (10, {"a": 12, "b": 4}, {"a": 7, "b": 3}), (10, {"a": 8, "b": 0}, {"a": 10}),
        (10, {"a": 8, "b": 8, "newer": 8, "silent": 8}, {"a": 5, "b": 5}),
        (2, dict.fromkeys("abcd", 8), dict.fromkeys("abcd", 1)),
        (100, dict.fromkeys(FLEET, 8), dict.fromkeys(FLEET, 1)),
    ],
    ids=["played at once", "even", "by credits", "engine restarts", "others do not count", "few tasks", "large fleet"],
)  # fmt: skip
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


async def test_issue_keeps_to_credits_and_capacity(store: Ledger) -> None:
    for server in "abc":
        await store.join(server, "first")
    requests = [
        TicketRequest("a", version=0, credits=3, tickets=9), TicketRequest("unknown", version=0, credits=9, tickets=9),
        TicketRequest("b", version=0, credits=9, tickets=2), TicketRequest("c", version=0, credits=9, tickets=9),
    ]  # fmt: skip
    for expected in ([3, 0, 2, 3], [0, 0, 0, 0]):
        issued = await store.issue(requests, train_tasks=TRAIN_TASKS)
        assert [len(tasks) for tasks in issued] == expected
    await store.finish()
    assert (await store.room(["a"], [0])).allowed == {0: 0}
    assert await store.verify() == []
