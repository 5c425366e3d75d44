"""An engine that outlives its deaths: it is started again, and its requests go on from their last token."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.rollout_servers.engines.base import (
    NOTHING,
    Completion,
    DirectTransport,
    Engine,
    EngineError,
    Pressure,
    RequestRefused,
    TensorSource,
    UpdateFailed,
)

log = get_log("rollout.engine")

CLOSE_DEADLINE_S = 60.0
BACKOFF_S = 1.0
"""Pause before the first restart; it doubles with each crash in a row."""
MAX_BACKOFF_S = 60.0

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

    def __init__(self, engine: Engine, start: Start, give_up_after: int) -> None:
        """`engine` is the first one; `start` starts each of the others."""
        self.engine = engine
        self.alive = True
        self.awaits_weights = False
        self.incarnation = uuid.uuid4().hex
        self.starts = 1
        self.deaths = 0
        self._start = start
        self._give_up_after = give_up_after
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
        in_a_row, give_up_after = len(self._in_a_row), self._give_up_after
        if in_a_row >= give_up_after:
            reasons = "; ".join(dict.fromkeys(self._in_a_row))
            raise EngineError(
                f"the engine died {in_a_row} times in a row, rollout.engine.give_up_after={give_up_after}: {reasons}"
            )
        pause_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** (in_a_row - 1))
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


@dataclass(frozen=True)
class Question:
    """A request, and when its answer must be there."""

    prompt_ids: Sequence[int]
    samples: int
    greedy: bool
    until: float
    max_tokens: int | None

    def after(self, begun: Completion, *, left: int) -> "Question":
        """Asks for the other tokens of an answer that was begun."""
        return replace(self, prompt_ids=[*self.prompt_ids, *begun.token_ids], samples=1, max_tokens=left)


class RestartingEngine:
    """An engine, and after its death the next one.

    Requests hear nothing of a death: they wait for the next engine, and if the dead one had a version of the learner's,
    until the next one has one too. Those who gave it weights hear `UpdateFailed`, and begin again with the next one.
    Any other `EngineError` is the end: too many died in a row.

    Attributes:
        requests_restarted: requests that lost all their tokens in a death, and began again.
    """

    def __init__(self, engine: Engine, start: Start, config: RolloutConfig) -> None:
        """`engine` is the first one; `start` starts each of the others."""
        self._lives = Lives(engine, start, config.engine.give_up_after)
        self._most_tokens = config.sampling.max_tokens
        self._asking: set[asyncio.Timeout] = set()
        self._pressure = Pressure(kv_cache_usage=0.0, preemptions=0)
        self.requests_restarted = 0

    @property
    def version(self) -> int:
        """The policy version that new tokens come from; 0 after every start, and while there is no engine."""
        return self._lives.engine.version if self._lives.alive else 0

    @property
    def shares_memory(self) -> bool:
        """Whether weights must be staged in shared memory."""
        return self._lives.engine.shares_memory

    @property
    def direct(self) -> DirectTransport | None:
        """As `Engine.direct`."""
        return self._lives.engine.direct

    @property
    def incarnation(self) -> str:
        """Another one after each start; empty while there is no engine."""
        return self._lives.incarnation if self._lives.alive else ""

    @property
    def ready(self) -> bool:
        """Whether requests are answered now: the engine lives, and has the weights that it should have."""
        return self._lives.alive and not self._lives.awaits_weights

    @property
    def deaths(self) -> int:
        """Engines that died, were declared unusable, or could not be started."""
        return self._lives.deaths

    # --- requests -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        samples: int,
        greedy: bool,
        deadline_s: float,
        max_tokens: int | None = None,
    ) -> list[Completion]:
        """`samples` answers to one prompt; those that are not finished at the deadline are cut short.

        Raises: RequestRefused, EngineError when no engine lives any more.
        """
        return await self._answer(Question(prompt_ids, samples, greedy, _now() + deadline_s, max_tokens))

    async def _answer(self, question: Question) -> list[Completion]:
        while True:
            try:
                async with asyncio.timeout_at(question.until):
                    await self._lives.until(lambda: self.ready)
            except TimeoutError:
                return [NOTHING] * question.samples
            try:
                return await self._ask(question)
            except RequestRefused:
                raise
            except EngineError as death:
                if death.unfinished is not None:
                    return await self._finish(question, death.unfinished)
                self.requests_restarted += 1

    async def _ask(self, question: Question) -> list[Completion]:
        """What the engine of now answers. Raises: RequestRefused, EngineError when it dies or is declared unusable."""
        engine = self._lives.engine
        try:
            async with asyncio.timeout(None) as unusable:
                self._asking.add(unusable)
                answers = await engine.generate(
                    question.prompt_ids,
                    samples=question.samples,
                    greedy=question.greedy,
                    deadline_s=max(0.0, question.until - _now()),
                    max_tokens=question.max_tokens,
                )
        except RequestRefused:
            raise
        except EngineError as error:
            self._lose(engine, str(error))
            raise
        except TimeoutError:
            assert unusable.expired(), "engines answer at the deadline; they don't raise"
            raise EngineError("the engine was declared unusable") from None
        finally:
            self._asking.discard(unusable)
        if any(answer.finish_reason != "abort" for answer in answers):
            self._lives.answered(engine)
        return answers

    async def _finish(self, question: Question, unfinished: Sequence[Completion]) -> list[Completion]:
        """What a dead engine left, finished by the next one."""
        most = self._most_tokens if question.max_tokens is None else question.max_tokens

        async def finish(begun: Completion) -> Completion:
            if begun.finish_reason != "abort":
                return begun
            left = most - len(begun.token_ids)
            if left <= 0:
                return replace(begun, finish_reason="length")
            (rest,) = await self._answer(question.after(begun, left=left))
            return stitch(begun, rest)

        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(finish(begun)) for begun in unfinished]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # one is enough to say why there is no answer
        return [answer.result() for answer in answers]

    # --- weights --------------------------------------------------------------------------------------------------

    async def join(self, group: Form) -> None:
        """As `Engine.join`. Raises: UpdateFailed, also when the engine crashes."""
        async with self.attended() as engine:
            await engine.join(group)

    async def install(self, version: int, manifest: Manifest, tensors: TensorSource) -> float:
        """As `Engine.install`. Raises: UpdateFailed, also when the engine crashes."""
        async with self.attended() as engine:
            stall_s = await engine.install(version, manifest, tensors)
        self._lives.has_weights()
        return stall_s

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log-prob of each token but the first, given those before it. Raises: UpdateFailed when the engine dies."""
        async with self.attended() as engine:
            return await engine.score(token_ids)

    async def checksums(self) -> dict[str, int] | None:
        """xxh3 (64 bits) of the engine's tensors, by name. Raises: UpdateFailed when the engine dies."""
        async with self.attended() as engine:
            return await engine.checksums()

    async def fail(self, reason: str) -> None:
        """Declares the engine of now unusable: what it works on is thrown away, and another one is started."""
        # First: what closing makes of these answers is not to be kept.
        told, self._asking = self._asking, set()
        for asking in told:
            asking.reschedule(_now())
        self._lives.lose(self._lives.engine, reason, requests=len(told))

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[Engine]:
        """The engine of now, to be given weights. Raises: UpdateFailed when there is none, or it dies meanwhile."""
        self._lives.check()
        if not self._lives.alive:
            raise UpdateFailed("the engine died and is not started again yet")
        engine = self._lives.engine
        try:
            yield engine
        except (RequestRefused, UpdateFailed):
            raise
        except EngineError as error:
            self._lose(engine, str(error))
            raise UpdateFailed(f"the engine died and is started again: {error}") from error
        if engine is not self._lives.engine or not self._lives.alive:
            raise UpdateFailed("the engine died meanwhile and is started again")

    async def pressure(self) -> Pressure:
        """How close the engine is to its limits; while it starts, there is no answer.

        An engine that lives and can't say it now is taken to be as close as it last was. Raises: EngineError.
        """
        while True:
            await self._lives.until(lambda: self._lives.alive)
            engine = self._lives.engine
            try:
                self._pressure = await engine.pressure()
            except RequestRefused as refusal:
                log.warning("engine does not tell its pressure", reason=str(refusal))
            except EngineError as error:
                self._lose(engine, str(error))
                continue
            return self._pressure

    async def close(self) -> None:
        """Frees everything; a restart that is under way ends."""
        await self._lives.close()

    def _lose(self, engine: Engine, reason: str) -> None:
        self._lives.lose(engine, reason, requests=len(self._asking))


def stitch(begun: Completion, rest: Completion) -> Completion:
    """One answer of what an engine left unfinished and of what the next one made of it; touching spans are merged."""
    seam = len(begun.token_ids)
    spans = list(begun.spans)
    for span in rest.spans:
        start, end = span.start + seam, span.end + seam
        if spans and (spans[-1].version, spans[-1].end) == (span.version, start):
            start = spans.pop().start
        spans.append(VersionSpan(version=span.version, start=start, end=end))
    return Completion(
        token_ids=[*begun.token_ids, *rest.token_ids],
        logprobs=[*begun.logprobs, *rest.logprobs],
        spans=spans,
        finish_reason=rest.finish_reason,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
