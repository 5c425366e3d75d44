"""Learners that wait for a lease: the last question of each is answered, once."""

from collections.abc import Callable

import pytest

from slipstream.buffer.handlers.learner import LeaseQueue
from slipstream.buffer.store.types import Lease, NotCurrentLearnerError, SupersededError, UnknownLearnerError
from slipstream.buffer.wire import messages as m


class FakeLedger:
    """Has groups for a lease or not, and knows the learner or not; `during` is called while it is asked."""

    def __init__(self) -> None:
        self.ready = False
        self.during: Callable[[], None] = lambda: None
        self.refusal: NotCurrentLearnerError | None = None

    async def lease(self, step: int, *, consuming_version: int, count: int, learner: str) -> Lease | None:
        assert learner == "a1"
        self.during()
        if self.refusal is not None:
            raise self.refusal
        return Lease([f"{step}"] * count, [1.0] * count) if self.ready else None


class Desk:
    """LeaseQueue, and all that it answers."""

    def __init__(self) -> None:
        self.ledger = FakeLedger()
        self.said: list[tuple[bytes, m.Lease | m.NotReady | m.Refused]] = []
        self.leasing = LeaseQueue(self.ledger, self._send)  # type: ignore[arg-type]

    async def _send(self, peer: bytes, message: m.Message) -> None:
        assert isinstance(message, m.Lease | m.NotReady | m.Refused)
        self.said.append((peer, message))

    def answered(self) -> list[tuple[bytes, str, int]]:
        return [(peer, type(message).__name__, message.request) for peer, message in self.said]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def request(number: int, *, wait_s: float = 60.0) -> m.LeaseRequest:
    return m.LeaseRequest(request=number, incarnation="a1", step=3, count=2, consuming_version=3, wait_s=wait_s)


async def test_lease_request_is_answered_once(desk: Desk) -> None:
    desk.leasing.add(b"a", request(1))
    await desk.leasing.grant()
    assert desk.answered() == []
    desk.ledger.ready = True
    await desk.leasing.grant()
    await desk.leasing.grant()
    assert desk.answered() == [(b"a", "Lease", 1)]


async def test_lease_request_expires_at_deadline(desk: Desk) -> None:
    desk.leasing.add(b"a", request(1, wait_s=0.0))
    await desk.leasing.grant()
    await desk.leasing.grant()
    assert desk.answered() == [(b"a", "NotReady", 1)]
    assert not desk.leasing


async def test_latest_request_of_each_learner_counts(desk: Desk) -> None:
    for peer, number in ((b"a", 1), (b"b", 2), (b"a", 3)):
        desk.leasing.add(peer, request(number))
    desk.ledger.ready = True
    await desk.leasing.grant()
    assert sorted(desk.answered()) == [(b"a", "Lease", 3), (b"b", "Lease", 2)]


async def test_repeated_request_keeps_deadline(desk: Desk) -> None:
    desk.leasing.add(b"a", request(1, wait_s=0.0))
    over = desk.leasing.until
    desk.leasing.add(b"a", request(1))
    assert desk.leasing.until == over
    await desk.leasing.grant()
    assert desk.answered() == [(b"a", "NotReady", 1)]
    assert desk.leasing.until is None


async def test_request_during_grant_is_not_lost(desk: Desk) -> None:
    desk.leasing.add(b"a", request(1))
    desk.ledger.ready = True
    desk.ledger.during = lambda: desk.leasing.add(b"a", request(2))
    await desk.leasing.grant()
    desk.ledger.during = lambda: None
    await desk.leasing.grant()
    assert desk.answered() == [(b"a", "Lease", 1), (b"a", "Lease", 2)]


async def test_oldest_requests_are_dropped_over_limit(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.buffer.handlers.learner.MAX_PENDING_REQUESTS", 2)
    for number in range(4):
        desk.leasing.add(str(number).encode(), request(number))
    desk.ledger.ready = True
    await desk.leasing.grant()
    assert [number for _, _, number in desk.answered()] == [2, 3]


async def test_superseded_learner_is_refused(desk: Desk) -> None:
    desk.leasing.add(b"a", request(1))
    desk.ledger.refusal = SupersededError("demo")
    await desk.leasing.grant()
    assert desk.answered() == [(b"a", "Refused", 1)]
    assert not desk.leasing


async def test_unknown_learner_waits_for_its_hello(desk: Desk) -> None:
    desk.ledger.ready = True
    desk.ledger.refusal = UnknownLearnerError("demo")
    desk.leasing.add(b"a", request(1))
    desk.leasing.add(b"b", request(2, wait_s=0.0))
    await desk.leasing.grant()
    assert desk.answered() == [(b"b", "NotReady", 2)]
    desk.ledger.refusal = None
    await desk.leasing.grant()
    assert desk.answered()[1:] == [(b"a", "Lease", 1)]
