"""Reads leased groups directly from Redis."""

import threading
from collections.abc import Sequence
from typing import Any

from slipstream.buffer.store.redis import connect, retry_through_outage
from slipstream.buffer.store.scripts import group_key
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode_group
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.schema.buffer import RedisConfig


class GroupReader:
    """Reads and decodes groups; one reader per learner rank."""

    def __init__(self, redis: RedisConfig, *, run: str) -> None:
        self._run = run
        self._config = redis
        self._given_up = threading.Event()
        self._redis = connect(redis)

    def give_up(self) -> None:
        """Ends another thread's wait for Redis with a StoppedError."""
        self._given_up.set()

    def read(self, group_ids: Sequence[str]) -> list[m.Group]:
        """The groups, in the order of their ids.

        Raises: SlipstreamError when one is not stored or Redis refuses the connection, DeadlineError when an outage of
        Redis is too long, StoppedError after `give_up`.
        """
        if not group_ids:
            return []
        blobs = retry_through_outage(self._config, lambda: self._blobs(group_ids), given_up=self._given_up)
        lost = [group_id for group_id, blob in zip(group_ids, blobs, strict=True) if blob is None]
        if lost:
            raise SlipstreamError(
                f"groups {', '.join(lost)} are leased but not stored; "
                "was Redis flushed, or does redis.url differ from the buffer's?"
            )
        blobs.reverse()
        # Popped, so that later groups reuse the memory: allocating new pages takes longer than decoding.
        return [decode_group(blobs.pop()) for _ in group_ids]

    def _blobs(self, group_ids: Sequence[str]) -> list[Any]:
        found: Any = self._redis.mget([group_key(self._run, group_id) for group_id in group_ids])
        return list(found)
