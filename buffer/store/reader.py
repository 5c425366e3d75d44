"""Reads what the ledger remembers of single groups: their facts, their histories, their bytes. It changes nothing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.buffer.store.keys import shard_of, shard_prefix
from slipstream.buffer.store.redis import AsyncRedis
from slipstream.configs import RunConfig

STORED = ("ready", "leased", "trained", "durable")
"""States in which a group's bytes are stored."""
STATES = ("issued", *STORED, "filtered", "expired", "reissued")


@dataclass(frozen=True)
class Event:
    """A state that a group went into."""

    at: float
    """Seconds since 1970, by Redis's clock."""
    state: str
    detail: str
    """May be empty."""


@dataclass(frozen=True)
class GroupRecord:
    """All that the ledger remembers of a group; an evaluation has its bytes only, and no state."""

    id: str
    about: Mapping[str, str]
    """As the scripts in `lua/` keep it."""
    steps: list[int]
    """Training steps that used it, in order."""
    history: list[Event]
    """In order; empty unless it was asked for."""
    blob: bytes | None
    """Its bytes, where they are stored."""

    @property
    def state(self) -> str | None:
        """One of STATES."""
        return self.about.get("state")

    def number(self, field: str) -> int | None:
        """A field that holds an integer, None where it has not been set yet."""
        value = self.about.get(field)
        return None if value is None else int(value)

    @property
    def lengths(self) -> dict[int, int]:
        """Answers that may be trained on, by the bucket of their length; empty for one that never arrived."""
        return {int(bucket): answers for bucket, answers in json.loads(self.about.get("lengths", "{}")).items()}


def parse_event(line: str) -> Event:
    """An entry of a history, as `note` in `lua/prelude.lua` writes it."""
    at, _, event = line.partition(" ")
    state, _, detail = event.partition(" ")
    return Event(float(at), state, detail)


class LedgerReader:
    """All shards of one run. Raises redis.RedisError when Redis can't be reached in time."""

    def __init__(self, redis: AsyncRedis, config: RunConfig) -> None:
        shards = config.buffer.shards
        self._redis = redis
        self._prefixes = [shard_prefix(config.run.name, shard) for shard in range(shards)]

    async def group(self, group_id: str) -> GroupRecord | None:
        """What is remembered of the group, None if there is nothing."""
        (found,) = await self.groups([group_id], with_history=True)
        return found

    async def groups(self, group_ids: Sequence[str], *, with_history: bool = False) -> list[GroupRecord | None]:
        """What is remembered of each; those of a shard as they are at one moment."""
        found: dict[str, GroupRecord | None] = {}
        for shard, prefix in enumerate(self._prefixes):
            mine = [group_id for group_id in group_ids if shard_of(group_id, len(self._prefixes)) == shard]
            pipeline = self._redis.pipeline(transaction=True)
            for group_id in mine:
                pipeline.hgetall(f"{prefix}:about:{group_id}")
                pipeline.lrange(f"{prefix}:steps:{group_id}", 0, -1)
                pipeline.get(f"{prefix}:group:{group_id}")
                pipeline.lrange(f"{prefix}:history:{group_id}", 0, -1 if with_history else 0)
            answers = await pipeline.execute()
            for number, group_id in enumerate(mine):
                about, steps, blob, history = answers[4 * number : 4 * number + 4]
                found[group_id] = _record(group_id, about, steps, blob, history if with_history else [])
        return [found[group_id] for group_id in group_ids]

    async def was_issued(self, group_id: str) -> bool:
        """Whether there ever was a ticket of this id, as it can only be if the ledger has counted so far."""
        if not group_id.isdecimal():
            return False
        shard = shard_of(group_id, len(self._prefixes))
        issued = int(await self._redis.hget(f"{self._prefixes[shard]}:meta", "next_id") or 0)
        return 0 < int(group_id) // len(self._prefixes) <= issued

    async def ids(self, state: str) -> list[str]:
        """The groups in a state, in its order: of trained and durable ones by the last step that used them."""
        scored: list[tuple[float, int, str]] = []
        for prefix in self._prefixes:
            members: list[Any] = await self._redis.zrange(f"{prefix}:{state}", 0, -1, withscores=True)
            scored += [(score, int(group_id), group_id.decode()) for group_id, score in members]
        return [group_id for _, _, group_id in sorted(scored)]

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
        about={name.decode(): value.decode() for name, value in about.items()},
        steps=[int(step) for step in steps],
        history=[parse_event(line.decode()) for line in history],
        blob=blob,
    )
