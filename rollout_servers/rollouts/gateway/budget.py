"""The budget of a session: its calls, tokens and time."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, NoReturn

from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.rewards.base import Ended as Limit
from slipstream.rollout_servers.rollouts.gateway.calls import CallRefused

MOST_CALLS: Final = 1024
"""Calls of a session, unless `rollout.episode.turns` says less; each is at most one node."""
MOST_RUNNING: Final = 32
"""Calls of a session at a time."""


class Budget:
    """Calls, tokens and time that a session may still use.

    Attributes:
        until: deadline, the loop's time.
        limit: the budget that its calls have exhausted.
    """

    def __init__(self, config: RolloutConfig, *, until: float) -> None:
        self.until = until
        self.limit: Limit | None = None
        self._config = config
        self._used_tokens = self._reserved_tokens = self._arriving = 0
        self._freed = asyncio.Condition()

    def begin(self) -> None:
        """Starts the time of the episode, once its agent has the session."""
        if (wall_s := self._config.episode.wall_s) is not None:
            self.until = min(self.until, asyncio.get_running_loop().time() + wall_s)

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While the body of a call arrives. Raises: CallRefused."""
        if self._arriving >= MOST_RUNNING:
            raise CallRefused(f"{MOST_RUNNING} calls of the session arrive", status=429, code="too_many_calls")
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    def require(self, *, answered: int, running: int) -> None:
        """Checks that there is room for one more call. Raises: CallRefused."""
        most = min(self._config.episode.turns or MOST_CALLS, MOST_CALLS)
        if asyncio.get_running_loop().time() >= self.until:
            self._exhaust("wall", "its time is over (rollout.episode.wall_s, rollout.group_deadline_s)")
        if answered + running >= most:
            self._exhaust("turns", f"{most} calls were answered (rollout.episode.turns)")
        if running >= MOST_RUNNING:
            raise CallRefused(f"{MOST_RUNNING} calls of the session are running", status=429, code="too_many_calls")

    @asynccontextmanager
    async def reserved(self, most: int, *, added: int) -> AsyncIterator[int]:
        """Room for an answer of at most `most` tokens behind `added` new ones, which waits for other calls' answers.

        Raises: CallRefused when the session's tokens are used up.
        """

        def room() -> int:
            return self._config.episode_tokens - self._used_tokens - self._reserved_tokens - added

        async with self._freed:
            await self._freed.wait_for(lambda: room() >= most or not self._reserved_tokens)
        if room() <= 0:
            self._exhaust("tokens", f"{self._used_tokens} tokens were used (rollout.episode.tokens)")
        most = min(most, room())
        self._reserved_tokens += most + added
        try:
            yield most
        finally:
            self._reserved_tokens -= most + added
            async with self._freed:
                self._freed.notify_all()

    def use(self, tokens: int) -> None:
        """Counts tokens of an answer and of what came before it since the last one."""
        self._used_tokens += tokens

    def _exhaust(self, limit: Limit, detail: str) -> NoReturn:
        """Raises: CallRefused."""
        self.limit = self.limit or limit
        raise CallRefused(f"the session's budget is exhausted: {detail}", code="session_budget_exhausted")
