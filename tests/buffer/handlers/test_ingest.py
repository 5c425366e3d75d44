"""Deliveries are stored in batches and acknowledged once they are stored."""

from collections.abc import Mapping, Sequence

import pytest

from slipstream.buffer.handlers.inspection import Inspector
from slipstream.buffer.handlers.peers import MalformedCounter
from slipstream.buffer.handlers.rollout import Ingest
from slipstream.buffer.store.redis import MemoryGuard
from slipstream.buffer.store.types import DeliveredGroup, Facts, Origin
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from tests.buffer.groups import train_group


class FakeLedger:
    """A ledger that stores everything and records its batches; its evaluations too."""

    def __init__(self) -> None:
        self.evaluations = self
        self.deliveries: list[list[str]] = []
        self.fails = False

    async def deliver(self, groups: Sequence[DeliveredGroup]) -> list[str]:
        if self.fails:
            raise ConnectionError("no connection")
        self.deliveries.append([group.id for group in groups])
        return ["ready"] * len(groups)

    async def places(self, ids: Sequence[str]) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(ids, (0, 0))

    async def record_failure(
        self, ticket_id: str, *, reason: str, ignored_failures: int, origin: Origin, lost: Mapping[str, int]
    ) -> str:
        return "void"

    async def filter(
        self, group_id: str, *, reason: str, facts: Facts, origin: Origin, ignored_failures: int = 0
    ) -> str:
        return "again"


class Harness:
    """The handler over a scripted ledger, and its replies."""

    def __init__(self, config: RunConfig) -> None:
        self.ledger = FakeLedger()
        self.replies: list[tuple[bytes, dict[str, str]]] = []
        self.malformed = MalformedCounter()
        self.returned: list[tuple[bytes, int]] = []
        self.ingest = Ingest(self.ledger, self, self.malformed, MemoryGuard(), self._send)  # type: ignore[arg-type]
        self._inspector = Inspector(config)

    def task(self, epoch: int, position: int, *, train_tasks: int) -> int:
        return position

    def ticket_returned(self, peer: bytes, *, delivered: int) -> None:
        self.returned.append((peer, delivered))

    async def _send(self, peer: bytes, message: m.Message) -> None:
        assert isinstance(message, m.Acknowledge)
        self.replies.append((peer, message.outcomes))

    async def take(self, peer: bytes, *ids: str, malformed: str | None = None) -> None:
        frames = {group_id: b"nonsense" if group_id == malformed else encode(train_group(group_id)) for group_id in ids}
        await self.ingest.take(
            peer,
            [self._inspector.inspect(group_id, frame) for group_id, frame in frames.items()],
            vocab_size=32,
            train_tasks=10,
        )


@pytest.fixture
def harness(config: RunConfig) -> Harness:
    return Harness(config)


async def test_deliveries_are_stored_together(harness: Harness) -> None:
    await harness.take(b"r0", "1", "2")
    await harness.take(b"r1", "3")
    assert (harness.ledger.deliveries, harness.replies) == ([], [])
    await harness.ingest.store()
    assert harness.ledger.deliveries == [["1", "2", "3"]]
    assert harness.replies == [(b"r0", {"1": "ready", "2": "ready"}), (b"r1", {"3": "ready"})]
    assert harness.returned == [(b"r0", 2), (b"r1", 1)]


@pytest.mark.parametrize("limit", [("STORED_AT_ONCE", 2), ("STORED_AT_ONCE_BYTES", 2 * len(encode(train_group("1"))))])
async def test_full_batch_is_stored_at_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, limit: tuple[str, int]
) -> None:
    monkeypatch.setattr(f"slipstream.buffer.handlers.rollout.{limit[0]}", limit[1])
    for group_id in "12345":
        await harness.take(b"r0", group_id)
    assert harness.ledger.deliveries == [["1", "2"], ["3", "4"]]


async def test_failed_store_is_not_acknowledged(harness: Harness) -> None:
    await harness.take(b"r0", "1")
    harness.ledger.fails = True
    with pytest.raises(ConnectionError):
        await harness.ingest.store()
    harness.ledger.fails = False
    await harness.ingest.store()
    assert harness.replies == []


async def test_malformed_group_does_not_affect_others(harness: Harness) -> None:
    await harness.take(b"r0", "1", "2", malformed="1")
    await harness.ingest.store()
    assert harness.malformed.count == 1
    assert harness.replies == [(b"r0", {"1": "again", "2": "ready"})]
