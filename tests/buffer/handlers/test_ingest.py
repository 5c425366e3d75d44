"""Deliveries wait to be stored together; nobody is told before they are."""

from collections.abc import Sequence

import pytest

from slipstream.buffer.handlers.ingest import Ingest, inspect
from slipstream.buffer.handlers.peers import MalformedCounter
from slipstream.buffer.store.redis import MemoryGuard
from slipstream.buffer.store.types import DeliveredGroup, Facts
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from tests.buffer.groups import train_group


class FakeLedger:
    """Stores everything, and remembers what it was asked to store at once."""

    def __init__(self) -> None:
        self.deliveries: list[list[str]] = []
        self.fails = False

    async def deliver(self, groups: Sequence[DeliveredGroup]) -> list[str]:
        if self.fails:
            raise ConnectionError("Redis is away")
        self.deliveries.append([group.id for group in groups])
        return ["ready"] * len(groups)

    async def evaluation_failed(self, ticket_id: str, *, patience: int) -> str:
        return "void"

    async def filter(self, group_id: str, *, reason: str, facts: Facts, patience: int = 0) -> str:
        return "again"


class Desk:
    """The handler over a scripted ledger, and its replies."""

    def __init__(self, config: RunConfig) -> None:
        self.ledger = FakeLedger()
        self.said: list[tuple[bytes, dict[str, str]]] = []
        self.malformed = MalformedCounter()
        self.returned: list[bytes] = []
        self.ingest = Ingest(self.ledger, self, self.malformed, MemoryGuard(), self._send)  # type: ignore[arg-type]
        self._config = config

    def ticket_returned(self, peer: bytes) -> None:
        self.returned.append(peer)

    async def _send(self, peer: bytes, message: m.Message) -> None:
        assert isinstance(message, m.Acknowledge)
        self.said.append((peer, message.outcomes))

    async def take(self, peer: bytes, *ids: str, malformed: str | None = None) -> None:
        frames = {group_id: b"nonsense" if group_id == malformed else encode(train_group(group_id)) for group_id in ids}
        await self.ingest.take(peer, [inspect(group_id, frame, self._config) for group_id, frame in frames.items()])


@pytest.fixture
def desk(config: RunConfig) -> Desk:
    return Desk(config)


async def test_deliveries_are_stored_together(desk: Desk) -> None:
    await desk.take(b"r0", "1", "2")
    await desk.take(b"r1", "3")
    assert (desk.ledger.deliveries, desk.said) == ([], [])
    await desk.ingest.store()
    assert desk.ledger.deliveries == [["1", "2", "3"]]
    assert desk.said == [(b"r0", {"1": "ready", "2": "ready"}), (b"r1", {"3": "ready"})]
    assert desk.returned == [b"r0", b"r1"]


@pytest.mark.parametrize("limit", [("STORED_AT_ONCE", 2), ("STORED_AT_ONCE_BYTES", 2 * len(encode(train_group("1"))))])
async def test_full_batch_is_stored_at_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, limit: tuple[str, int]
) -> None:
    monkeypatch.setattr(f"slipstream.buffer.handlers.ingest.{limit[0]}", limit[1])
    for group_id in "12345":
        await desk.take(b"r0", group_id)
    assert desk.ledger.deliveries == [["1", "2"], ["3", "4"]]


async def test_failed_store_is_not_acknowledged(desk: Desk) -> None:
    await desk.take(b"r0", "1")
    desk.ledger.fails = True
    with pytest.raises(ConnectionError):
        await desk.ingest.store()
    desk.ledger.fails = False
    await desk.ingest.store()
    assert desk.said == []


async def test_malformed_group_does_not_affect_others(desk: Desk) -> None:
    await desk.take(b"r0", "1", "2", malformed="1")
    await desk.ingest.store()
    assert desk.malformed.count == 1
    assert desk.said == [(b"r0", {"1": "again", "2": "ready"})]
