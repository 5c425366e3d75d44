"""Waiting lease requests: the latest of each learner is answered, once."""

from collections.abc import Callable

import pytest
from redis.exceptions import OutOfMemoryError

from slipstream.buffer.handlers.learner import LeaseQueue
from slipstream.buffer.store.redis import MemoryGuard
from slipstream.buffer.store.types import (
    LeasedGroups,
    NotCurrentLearnerError,
    SpilledGroupsError,
    SupersededError,
    UnknownLearnerError,
)
from slipstream.buffer.wire import messages as m


class FakeLedger:
    """A ledger that grants leases if `ready`, raises `refusal` if set, and calls `during` in each request."""

    def __init__(self) -> None:
        self.ready = False
        self.during: Callable[[], None] = lambda: None
        self.refusal: NotCurrentLearnerError | None = None
        self.spilled: list[str] = []

    async def lease(self, step: int, *, consuming_version: int, count: int, learner: str) -> LeasedGroups | None:
        assert learner == "a1"
        self.during()
        if self.refusal is not None:
            raise self.refusal
        if self.spilled:
            raise SpilledGroupsError(self.spilled)
        return LeasedGroups([f"{step}"] * count, [1.0] * count, consuming_version, [0]) if self.ready else None


class FakeSpiller:
    """Reads groups back from spill files, unless Redis is full."""

    def __init__(self, ledger: FakeLedger) -> None:
        self.ledger = ledger
        self.is_full = False

    async def restore(self, ids: list[str]) -> bool:
        assert ids == self.ledger.spilled
        if self.is_full:
            raise OutOfMemoryError
        self.ledger.spilled = []
        return True


class Harness:
    """The handler over a scripted ledger, and its replies."""

    def __init__(self) -> None:
        self.ledger = FakeLedger()
        self.replies: list[tuple[bytes, m.Lease | m.NotReady | m.Refused]] = []
        self.spiller = FakeSpiller(self.ledger)
        self.leasing = LeaseQueue(self.ledger, self.spiller, MemoryGuard(), self._send)  # type: ignore[arg-type]

    async def _send(self, peer: bytes, message: m.Message) -> None:
        assert isinstance(message, m.Lease | m.NotReady | m.Refused)
        self.replies.append((peer, message))

    def sent(self) -> list[tuple[bytes, str, int]]:
        return [(peer, type(message).__name__, message.request) for peer, message in self.replies]


@pytest.fixture
def harness() -> Harness:
    return Harness()


def request(number: int, *, wait_s: float = 60.0) -> m.LeaseRequest:
    return m.LeaseRequest(request=number, incarnation="a1", step=3, count=2, consuming_version=3, wait_s=wait_s)


async def test_spilled_groups_are_restored_before_a_lease(harness: Harness) -> None:
    harness.ledger.ready, harness.ledger.spilled, harness.spiller.is_full = True, ["3"], True
    harness.leasing.add(b"a", request(1))
    await harness.leasing.grant()
    assert harness.sent() == []
    harness.spiller.is_full = False
    await harness.leasing.grant()
    assert harness.sent() == [(b"a", "Lease", 1)]


async def test_lease_request_is_answered_once(harness: Harness) -> None:
    harness.leasing.add(b"a", request(1))
    await harness.leasing.grant()
    assert harness.sent() == []
    harness.ledger.ready = True
    await harness.leasing.grant()
    await harness.leasing.grant()
    assert harness.sent() == [(b"a", "Lease", 1)]


async def test_latest_request_of_each_learner_counts(harness: Harness) -> None:
    for peer, number in ((b"a", 1), (b"b", 2), (b"a", 3)):
        harness.leasing.add(peer, request(number))
    harness.ledger.ready = True
    await harness.leasing.grant()
    assert sorted(harness.sent()) == [(b"a", "Lease", 3), (b"b", "Lease", 2)]


async def test_repeated_request_keeps_deadline(harness: Harness) -> None:
    harness.leasing.add(b"a", request(1, wait_s=0.0))
    deadline = harness.leasing.until
    harness.leasing.add(b"a", request(1))
    assert harness.leasing.until == deadline
    for _ in range(2):
        await harness.leasing.grant()
    assert harness.sent() == [(b"a", "NotReady", 1)]
    assert harness.leasing.until is None


async def test_request_during_grant_is_not_lost(harness: Harness) -> None:
    harness.leasing.add(b"a", request(1))
    harness.ledger.ready = True
    harness.ledger.during = lambda: harness.leasing.add(b"a", request(2))
    await harness.leasing.grant()
    harness.ledger.during = lambda: None
    await harness.leasing.grant()
    assert harness.sent() == [(b"a", "Lease", 1), (b"a", "Lease", 2)]


async def test_oldest_requests_are_dropped_over_limit(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.buffer.handlers.learner.MAX_PENDING_REQUESTS", 2)
    for number in range(4):
        harness.leasing.add(str(number).encode(), request(number))
    harness.ledger.ready = True
    await harness.leasing.grant()
    assert [number for _, _, number in harness.sent()] == [2, 3]


async def test_superseded_learner_is_refused(harness: Harness) -> None:
    harness.leasing.add(b"a", request(1))
    harness.ledger.refusal = SupersededError("demo")
    await harness.leasing.grant()
    assert harness.sent() == [(b"a", "Refused", 1)]
    assert not harness.leasing


async def test_unknown_learner_waits_for_its_hello(harness: Harness) -> None:
    harness.ledger.ready = True
    harness.ledger.refusal = UnknownLearnerError("demo")
    harness.leasing.add(b"a", request(1))
    harness.leasing.add(b"b", request(2, wait_s=0.0))
    await harness.leasing.grant()
    harness.ledger.refusal = None
    await harness.leasing.grant()
    assert harness.sent() == [(b"b", "NotReady", 2), (b"a", "Lease", 1)]
