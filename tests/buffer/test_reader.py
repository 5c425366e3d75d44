"""What is read back of single groups."""

from redis.asyncio import Redis

from slipstream.buffer.store.reader import Event, LedgerReader, parse_event
from slipstream.buffer.store.shard import RedisStore
from tests.buffer.conftest import MakeConfig
from tests.buffer.ledger import deliver, issue


def test_an_event_has_a_time_a_state_and_perhaps_a_detail() -> None:
    assert parse_event("12.500000 ready oldest version 3") == Event(12.5, "ready", "oldest version 3")
    assert parse_event("12.500000 durable") == Event(12.5, "durable", "")


async def test_groups_come_in_the_order_asked_for_whatever_their_shards(
    redis: Redis, make_config: MakeConfig, run_name: str
) -> None:
    reader = LedgerReader(redis, make_config(shards=2))
    stores = [RedisStore(redis, run_name, shard=shard, shards=2) for shard in range(2)]
    ids = sorted([task.id for store in stores for task in await issue(store, 2)], key=int)
    assert ids == ["2", "3", "4", "5"]
    await deliver(stores[1], ["3"])
    found = await reader.groups(["5", "3", "9", "2"])
    assert [each and (each.id, each.state, each.blob) for each in found] == [
        ("5", "issued", None),
        ("3", "ready", b"bytes of 3"),
        None,
        ("2", "issued", None),
    ]
    assert await reader.latest("issued", 2) == ["5", "4"]
    assert [await reader.was_issued(group_id) for group_id in ("0", "1", "2", "5", "6", "7", "e0-0")] == [
        False, False, True, True, False, False, False,
    ]  # fmt: skip


async def test_lengths_and_histories_are_read_only_where_there_are_any(
    store: RedisStore, redis: Redis, make_config: MakeConfig
) -> None:
    reader = LedgerReader(redis, make_config())
    arrived, waiting = [task.id for task in await issue(store, 2)]
    await deliver(store, [arrived], length=70)
    record = await reader.group(arrived)
    assert record is not None
    assert record.lengths == {70: 1}
    assert [event.state for event in record.history] == ["issued", "ready"]
    record = await reader.group(waiting)
    assert record is not None
    assert (record.lengths, record.number("oldest"), record.number("version"), record.steps) == ({}, None, 0, [])
