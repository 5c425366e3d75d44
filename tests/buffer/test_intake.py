"""Deliveries wait to be stored together; nobody is told before they are."""

from collections.abc import Sequence

import pytest

from slipstream.buffer.handlers.ingest import Intake, look_at
from slipstream.buffer.store.types import DeliveredGroup, Facts
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, encode
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
    """An intake, and all that it says."""

    def __init__(self, config: RunConfig) -> None:
        self.ledger = FakeLedger()
        self.said: list[tuple[bytes, dict[str, str]]] = []
        self.malformed: list[tuple[str, str]] = []
        self.landed: list[bytes] = []
        self.intake = Intake(self.ledger, self._send, self._malformed, self.landed.append)  # type: ignore[arg-type]
        self._config = config

    async def _send(self, peer: bytes, message: m.Message) -> None:
        assert isinstance(message, m.Acknowledge)
        self.said.append((peer, message.outcomes))

    def _malformed(self, group_id: str, error: FrameError, outcome: str) -> None:
        self.malformed.append((group_id, outcome))

    async def take(self, peer: bytes, *ids: str, malformed: str | None = None) -> None:
        frames = {group_id: b"nonsense" if group_id == malformed else encode(train_group(group_id)) for group_id in ids}
        await self.intake.take(peer, [look_at(group_id, frame, self._config) for group_id, frame in frames.items()])


@pytest.fixture
def desk(config: RunConfig) -> Desk:
    return Desk(config)


async def test_what_several_servers_deliver_is_stored_together_and_acknowledged_to_each(desk: Desk) -> None:
    await desk.take(b"r0", "1", "2")
    await desk.take(b"r1", "3")
    assert (desk.ledger.deliveries, desk.said) == ([], [])
    await desk.intake.settle()
    assert desk.ledger.deliveries == [["1", "2", "3"]]
    assert desk.said == [(b"r0", {"1": "ready", "2": "ready"}), (b"r1", {"3": "ready"})]
    assert desk.landed == [b"r0", b"r1"]


@pytest.mark.parametrize("limit", [("STORED_AT_ONCE", 2), ("STORED_AT_ONCE_BYTES", 2 * len(encode(train_group("1"))))])
async def test_what_is_much_is_stored_without_being_told_to(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, limit: tuple[str, int]
) -> None:
    monkeypatch.setattr(f"slipstream.buffer.handlers.ingest.{limit[0]}", limit[1])
    for group_id in "12345":
        await desk.take(b"r0", group_id)
    assert desk.ledger.deliveries == [["1", "2"], ["3", "4"]]


async def test_what_could_not_be_stored_is_not_acknowledged_then_or_later(desk: Desk) -> None:
    await desk.take(b"r0", "1")
    desk.ledger.fails = True
    with pytest.raises(ConnectionError):
        await desk.intake.settle()
    desk.ledger.fails = False
    await desk.intake.settle()
    assert desk.said == []


async def test_a_malformed_group_is_told_of_and_its_neighbours_are_stored(desk: Desk) -> None:
    await desk.take(b"r0", "1", "2", malformed="1")
    await desk.intake.settle()
    assert desk.malformed == [("1", "again")]
    assert desk.said == [(b"r0", {"1": "again", "2": "ready"})]
