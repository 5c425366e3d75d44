"""A Redis that has lost the end of its file: the ledger as it was a moment ago."""

from dataclasses import dataclass

from redis.asyncio import Redis

from slipstream.buffer.store.scripts import run_prefix


@dataclass(frozen=True)
class Moment:
    """All that Redis held of a run."""

    redis: Redis
    run: str
    values: dict[bytes, bytes | None]

    @classmethod
    async def of(cls, redis: Redis, run: str) -> "Moment":
        """The present one."""
        return cls(redis, run, {key: await redis.dump(key) for key in await _keys(redis, run)})

    async def return_to(self) -> None:
        """Forgets whatever came after it."""
        async with self.redis.pipeline(transaction=True) as changes:
            for key in await _keys(self.redis, self.run):
                changes.delete(key)
            for key, value in self.values.items():
                assert value is not None, "nothing else changes the run meanwhile"
                changes.restore(key, 0, value)
            await changes.execute()


async def _keys(redis: Redis, run: str) -> list[bytes]:
    return [key async for key in redis.scan_iter(match=f"{run_prefix(run)}*", count=1000)]
