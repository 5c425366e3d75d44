"""One engine after the other: which of them lives, what the dead ones died of, and when it is enough."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable

from slipstream.configs.logs import get_log
from slipstream.configs.schema.rollout import RestartConfig
from slipstream.rollout_servers.engines.base import Engine, EngineError

log = get_log("rollout.engine")

CLOSE_DEADLINE_S = 60.0

Start = Callable[[], Awaitable[Engine]]


class Lives:
    """Starts another engine when one dies, with pauses that double from death to death without an answer between them.

    Attributes:
        engine: the latest, dead or alive.
        alive: whether it lives.
        awaits_weights: it has the initial weights, but one before it had newer ones.
        incarnation: new for each engine.
        starts: engines that were started.
        deaths: engines that died, were declared unusable, or could not be started.
    """

    def __init__(self, engine: Engine, start: Start, config: RestartConfig) -> None:
        """`engine` is the first one; `start` starts each of the others."""
        self.engine = engine
        self.alive = True
        self.awaits_weights = False
        self.incarnation = uuid.uuid4().hex
        self.starts = 1
        self.deaths = 0
        self._start = start
        self._config = config
        self._in_a_row: list[str] = []
        self._end: BaseException | None = None
        self._is_closed = False
        self._changed = asyncio.Event()
        self._restart: asyncio.Task[None] | None = None

    def lose(self, engine: Engine, reason: str, *, requests: int) -> None:
        """`engine` died while it worked on so many requests; of one death many may hear."""
        if engine is not self.engine or not self.alive:
            return
        self.awaits_weights = self.awaits_weights or engine.version > 0
        self.alive = False
        self._restart = asyncio.create_task(self._start_another(reason, requests))
        self._restart.add_done_callback(self._restarted)

    def answered(self, engine: Engine) -> None:
        """`engine` finished an answer: it is of use."""
        if engine is self.engine:
            self._in_a_row.clear()

    def has_weights(self) -> None:
        """The engine was given a version of the learner's; which one it should be, the learner knows best."""
        self.awaits_weights = False
        self._note_change()

    def check(self) -> None:
        """Raises: what ended the restarts, if there are to be no more."""
        if self._end is not None:
            raise self._end

    async def until(self, met: Callable[[], bool]) -> None:
        """Waits for a state of the engine. Raises: what ended the restarts, if there are to be no more."""
        while not met():
            self.check()
            await self._changed.wait()

    async def close(self) -> None:
        """Closes the engine; a restart that is under way ends."""
        self._end = self._end or EngineError("the engine was closed")
        self.alive = False
        self._note_change()
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.wait([self._restart], timeout=CLOSE_DEADLINE_S)
        await self._close_engine()

    async def _start_another(self, reason: str, requests: int) -> None:
        pause_s = self._count_death(reason, requests)
        await self._close_engine()
        while True:
            await asyncio.sleep(pause_s)
            try:
                self.engine = await self._start()
            except EngineError as error:
                pause_s = self._count_death(str(error), requests=0)
            else:
                break
        self.alive, self._is_closed = True, False
        self.incarnation = uuid.uuid4().hex
        self.starts += 1
        log.info("engine started again", starts=self.starts, awaits_weights=self.awaits_weights)

    def _count_death(self, reason: str, requests: int) -> float:
        """Returns the pause before the next start, in seconds. Raises: EngineError when it was one death too many."""
        self.deaths += 1
        self._in_a_row.append(reason)
        in_a_row, give_up_after = len(self._in_a_row), self._config.give_up_after
        if in_a_row >= give_up_after:
            reasons = "; ".join(dict.fromkeys(self._in_a_row))
            raise EngineError(
                f"the engine died {in_a_row} times in a row, rollout.engine.restart.give_up_after={give_up_after}: "
                f"{reasons}"
            )
        pause_s = min(self._config.max_backoff_s, self._config.backoff_s * 2.0 ** (in_a_row - 1))
        log.warning("engine died", reason=reason, requests=requests, in_a_row=in_a_row, restart_in_s=pause_s)
        return pause_s

    def _restarted(self, restart: "asyncio.Task[None]") -> None:
        if not restart.cancelled():
            self._end = self._end or restart.exception()
        self._note_change()

    async def _close_engine(self) -> None:
        if self._is_closed:
            return
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await self.engine.close()
        except (TimeoutError, EngineError) as error:
            log.error("engine was not closed and may keep its memory", reason=str(error) or "no answer")
        self._is_closed = True

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
