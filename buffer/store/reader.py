"""Read-only access to single groups of the ledger: facts, histories, bytes in Redis or in a spill file."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis.asyncio import Redis

from slipstream.buffer.store.redis import run_prefix
from slipstream.buffer.store.spill import Location, SpillError, SpillFolder

STORED = ("ready", "leased", "trained", "durable")
"""States in which a group's bytes are stored."""
STATES = ("issued", *STORED, "filtered", "expired", "reissued")


@dataclass(frozen=True)
class Event:
    """A group's transition into a state."""

    at: float
    """Seconds since 1970, by Redis's clock."""
    state: str
    detail: str
    """May be empty."""


@dataclass(frozen=True)
class GroupRecord:
    """Everything the ledger has of a group; a slice of an evaluation has only bytes, and no state."""

    id: str
    fields: Mapping[str, str]
    """Redis hash that the scripts in `lua/` write."""
    steps: list[int]
    """Training steps that used it, in order."""
    history: list[Event]
    """In order; empty unless it was asked for."""
    blob: bytes | None
    """Its bytes, where they are stored and can be read."""
    location: str = ""
    """The place of its bytes in a spill file; empty if they are in Redis."""
    spill_error: str = ""
    """Why they can't be read from there."""

    @property
    def state(self) -> str | None:
        """One of STATES."""
        return self.fields.get("state")

    def number(self, field: str) -> int | None:
        """A field that holds an integer, None where it has not been set yet."""
        value = self.fields.get(field)
        return None if value is None else int(value)

    @property
    def lengths(self) -> dict[int, int]:
        """Answers that may be trained on, by the bucket of their length; empty for a group that never arrived."""
        return {int(bucket): answers for bucket, answers in json.loads(self.fields.get("lengths", "{}")).items()}


def parse_event(line: str) -> Event:
    """An entry of a history, as `append_history` in `lua/prelude.lua` writes it."""
    at, _, event = line.partition(" ")
    state, _, detail = event.partition(" ")
    return Event(float(at), state, detail)


class LedgerReader:
    """Reads single groups of one run. Raises redis.RedisError when Redis can't be reached in time."""

    def __init__(self, redis: Redis, run: str, spill: SpillFolder) -> None:
        self._redis = redis
        self._spill = spill
        self._prefix = run_prefix(run)

    async def group(self, group_id: str) -> GroupRecord | None:
        """The group's record, None if the ledger has nothing of it."""
        (found,) = await self.groups([group_id], with_history=True)
        return found

    async def used_in(self, first: int, last: int) -> dict[int, list[str]]:
        """Ids of the groups that steps used, by step (0-based), of those from `first` to `last` that are remembered."""
        pipeline = self._redis.pipeline(transaction=True)
        for state in ("used", "trained", "durable"):
            pipeline.zrangebyscore(f"{self._prefix}:{state}", first, "+inf")
        ids = [number.decode() for some in await pipeline.execute() for number in some]
        for group_id in ids:
            pipeline.lrange(f"{self._prefix}:steps:{group_id}", 0, -1)
        by_step = defaultdict[int, list[str]](list)
        for group_id, steps in zip(ids, await pipeline.execute(), strict=True):
            for step in {int(step) for step in steps if first <= int(step) <= last}:
                by_step[step].append(group_id)
        return by_step

    async def histories(self, group_ids: Sequence[str]) -> list[GroupRecord]:
        """Records of groups that the ledger has, with their histories and without their bytes."""
        pipeline = self._redis.pipeline(transaction=True)
        for group_id in group_ids:
            pipeline.hgetall(f"{self._prefix}:about:{group_id}")
            pipeline.lrange(f"{self._prefix}:steps:{group_id}", 0, -1)
            pipeline.lrange(f"{self._prefix}:history:{group_id}", 0, -1)
        answers = await pipeline.execute()
        found = [
            _record(group_id, answers[3 * number], answers[3 * number + 1], None, answers[3 * number + 2])
            for number, group_id in enumerate(group_ids)
        ]
        return [record for record in found if record is not None]

    async def groups(self, group_ids: Sequence[str], *, with_history: bool = False) -> list[GroupRecord | None]:
        """The groups' records, read atomically."""
        pipeline = self._redis.pipeline(transaction=True)
        for group_id in group_ids:
            pipeline.hgetall(f"{self._prefix}:about:{group_id}")
            pipeline.lrange(f"{self._prefix}:steps:{group_id}", 0, -1)
            pipeline.get(f"{self._prefix}:group:{group_id}")
            pipeline.hget(f"{self._prefix}:spilled", group_id)
            pipeline.lrange(f"{self._prefix}:history:{group_id}", 0, -1 if with_history else 0)
        answers = await pipeline.execute()
        found = []
        for number, group_id in enumerate(group_ids):
            about, steps, blob, location, history = answers[5 * number : 5 * number + 5]
            record = _record(group_id, about, steps, blob, history if with_history else [])
            if record is not None and blob is None and location is not None:
                record = self._with_spilled(record, location.decode())
            found.append(record)
        return found

    async def fields(self, group_ids: Sequence[str]) -> list[dict[str, str]]:
        """The groups' fields alone, as in `GroupRecord.fields`; empty for an unknown one."""
        found = []
        for start in range(0, len(group_ids), 1000):
            pipeline = self._redis.pipeline(transaction=False)
            for group_id in group_ids[start : start + 1000]:
                pipeline.hgetall(f"{self._prefix}:about:{group_id}")
            found += [_decoded(about) for about in await pipeline.execute()]
        return found

    async def unreadable(self) -> dict[str, str]:
        """The groups whose bytes can't be read from their spill files, with the reason. Reads all of them."""
        errors = {}
        async for group_id, location in self._redis.hscan_iter(f"{self._prefix}:spilled", count=1000):
            try:
                self._spill.read(Location.parse(location.decode()))
            except SpillError as error:
                errors[group_id.decode()] = str(error)
        return errors

    def _with_spilled(self, record: GroupRecord, location: str) -> GroupRecord:
        try:
            return replace(record, location=location, blob=self._spill.read(Location.parse(location)))
        except SpillError as error:
            return replace(record, location=location, spill_error=str(error))

    async def was_issued(self, group_id: str) -> bool:
        """True if a ticket with this id was ever issued."""
        if not group_id.isdecimal():
            return False
        return 0 < int(group_id) <= int(await self._redis.hget(f"{self._prefix}:meta", "next_id") or 0)

    async def ids(self, state: str) -> list[str]:
        """Ids of the groups in a state, in its order: trained and durable ones by the last step that used them."""
        members: list[Any] = await self._redis.zrange(f"{self._prefix}:{state}", 0, -1, withscores=True)
        return [
            group_id for _, _, group_id in sorted((score, int(number), number.decode()) for number, score in members)
        ]

    async def latest(self, state: str, count: int) -> list[str]:
        """The groups in a state that were issued last, the newest ticket first."""
        return sorted(await self.ids(state), key=int, reverse=True)[:count]


def _record(
    group_id: str, about: Mapping[bytes, bytes], steps: Sequence[bytes], blob: bytes | None, history: Sequence[bytes]
) -> GroupRecord | None:
    if not about and blob is None:
        return None
    return GroupRecord(
        id=group_id,
        fields=_decoded(about),
        steps=[int(step) for step in steps],
        history=[parse_event(line.decode()) for line in history],
        blob=blob,
    )


def _decoded(about: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in about.items()}
