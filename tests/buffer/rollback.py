"""Rollback of a run in Redis, as after the loss of the end of its file."""

from dataclasses import dataclass

from redis.asyncio import Redis

from slipstream.buffer.store.redis import run_prefix


@dataclass(frozen=True)
class Moment:
    """The keys of a run at one moment."""

    redis: Redis
    run: str
    values: dict[bytes, bytes | None]

    @classmethod
    async def of(cls, redis: Redis, run: str) -> "Moment":
        """The present one."""
        return cls(redis, run, {key: await redis.dump(key) for key in await _keys(redis, run)})

    async def return_to(self) -> None:
        """Restores this state."""
        async with self.redis.pipeline(transaction=True) as changes:
            for key in await _keys(self.redis, self.run):
                changes.delete(key)
            for key, value in self.values.items():
                assert value is not None, "the run changed during the dump"
                changes.restore(key, 0, value)
            await changes.execute()


async def _keys(redis: Redis, run: str) -> list[bytes]:
    return [key async for key in redis.scan_iter(match=f"{run_prefix(run)}*", count=1000)]
