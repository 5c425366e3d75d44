"""What is read back of single groups."""

from pathlib import Path

import pytest
from redis.asyncio import Redis

from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.reader import Event, LedgerReader, parse_event
from slipstream.buffer.store.spill import SpillFolder
from tests.buffer.ledger import deliver, issue


@pytest.fixture
def reader(redis: Redis, run_name: str, tmp_path: Path) -> LedgerReader:
    return LedgerReader(redis, run_name, SpillFolder(tmp_path))


def test_parse_event() -> None:
    assert parse_event("12.500000 ready oldest version 3") == Event(12.5, "ready", "oldest version 3")
    assert parse_event("12.500000 durable") == Event(12.5, "durable", "")


async def test_groups_are_read_in_request_order(store: Ledger, reader: LedgerReader) -> None:
    assert [task.id for task in await issue(store, 3)] == ["1", "2", "3"]
    await deliver(store, ["2"])
    found = await reader.groups(["3", "2", "9", "1"])
    assert [each and (each.id, each.state, each.blob) for each in found] == [
        ("3", "issued", None), ("2", "ready", b"bytes of 2"), None, ("1", "issued", None),
    ]  # fmt: skip
    assert await reader.latest("issued", 2) == ["3", "1"]
    assert [await reader.was_issued(group_id) for group_id in ("0", "1", "3", "4", "e0-0")] == [
        False, True, True, False, False,
    ]  # fmt: skip


async def test_lengths_and_history_of_groups(store: Ledger, reader: LedgerReader) -> None:
    arrived, waiting = [task.id for task in await issue(store, 2)]
    await deliver(store, [arrived], length=70)
    record = await reader.group(arrived)
    assert record is not None
    assert record.lengths == {70: 1}
    assert [event.state for event in record.history] == ["issued", "ready"]
    record = await reader.group(waiting)
    assert record is not None
    assert (record.lengths, record.number("oldest"), record.number("version"), record.steps) == ({}, None, 0, [])
