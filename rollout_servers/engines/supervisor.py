"""Restarts a crashed engine with back-off; requests continue at the next engine from their last token."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import torch

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.configs.runtime import tracing
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.rollout_servers.engines.base import (
    NOTHING,
    Completion,
    DirectTransport,
    Engine,
    EngineError,
    Pressure,
    Request,
    RequestRefused,
    TensorSource,
    UpdateFailed,
)
from slipstream.rollout_servers.tally import ENGINE_CRASH

log = get_log("rollout.engine")

CLOSE_DEADLINE_S = 60.0
BACKOFF_S = 1.0
"""Pause before the first restart; it doubles with each crash in a row."""
MAX_BACKOFF_S = 60.0

Start = Callable[[], Awaitable[Engine]]


class Restarts:
    """The current engine, and its restarts.

    Attributes:
        engine: the latest engine, which may have crashed.
        alive: whether it runs.
        awaits_weights: it has the initial weights, but an earlier engine had newer ones.
        incarnation: a new id for each engine.
        crashes: engines that crashed, were declared unusable, or failed to start.
    """

    def __init__(self, engine: Engine, start: Start, give_up_after: int) -> None:
        """`engine` is the first one; `start` starts each of the others."""
        self.engine = engine
        self.alive = True
        self.awaits_weights = False
        self.incarnation = uuid.uuid4().hex
        self.crashes = 0
        self._start = start
        self._give_up_after = give_up_after
        self._in_a_row: list[str] = []
        self._end: BaseException | None = None
        self._is_closed = False
        self._changed = asyncio.Event()
        self._restart: asyncio.Task[None] | None = None

    def crashed(self, engine: Engine, reason: str, *, requests: int) -> None:
        """Starts another engine; later reports of the same crash are ignored. `requests`: those in flight."""
        if engine is not self.engine or not self.alive:
            return
        self.awaits_weights = self.awaits_weights or engine.version > 0
        self.alive = False
        self._restart = asyncio.create_task(self._traced_start(reason, requests))
        self._restart.add_done_callback(self._restarted)

    def answered(self, engine: Engine) -> None:
        """Ends a row of crashes: `engine` finished an answer."""
        if engine is self.engine:
            self._in_a_row.clear()

    def installed(self) -> None:
        """Notes that the engine has weights of the learner, which decides their version."""
        self.awaits_weights = False
        self._notify()

    def check(self) -> None:
        """Raises: the reason for which there are no more restarts, if it came to that."""
        if self._end is not None:
            raise self._end

    async def until(self, met: Callable[[], bool]) -> None:
        """Waits for a condition. Raises: as `check`."""
        while not met():
            self.check()
            await self._changed.wait()

    async def close(self) -> None:
        """Closes the engine and cancels a restart."""
        self._end = self._end or EngineError("the engine was closed")
        self.alive = False
        self._notify()
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.wait([self._restart], timeout=CLOSE_DEADLINE_S)
        await self._close_engine()

    async def _traced_start(self, reason: str, requests: int) -> None:
        with tracing.span("restart engine", reason=reason[:200], requests=requests):
            await self._start_another(reason, requests)

    async def _start_another(self, reason: str, requests: int) -> None:
        pause_s = self._count_crash(reason, requests)
        await self._close_engine()
        while True:
            await asyncio.sleep(pause_s)
            try:
                self.engine = await self._start()
            except EngineError as error:
                pause_s = self._count_crash(str(error), requests=0)
            else:
                break
        self.alive, self._is_closed = True, False
        self.incarnation = uuid.uuid4().hex
        log.info("engine restarted", crashes=self.crashes, awaits_weights=self.awaits_weights)

    def _count_crash(self, reason: str, requests: int) -> float:
        """Returns the pause before the next start, in seconds. Raises: EngineError after too many crashes in a row."""
        self.crashes += 1
        self._in_a_row.append(reason)
        in_a_row, give_up_after = len(self._in_a_row), self._give_up_after
        if in_a_row >= give_up_after:
            reasons = "; ".join(dict.fromkeys(self._in_a_row))
            raise EngineError(
                f"the engine crashed {in_a_row} times in a row, rollout.engine.give_up_after={give_up_after}: {reasons}"
            )
        pause_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** (in_a_row - 1))
        log.warning("engine crashed", reason=reason, requests=requests, in_a_row=in_a_row, restart_in_s=pause_s)
        return pause_s

    def _restarted(self, restart: "asyncio.Task[None]") -> None:
        if not restart.cancelled():
            self._end = self._end or restart.exception()
        self._notify()

    async def _close_engine(self) -> None:
        if self._is_closed:
            return
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await self.engine.close()
        except (TimeoutError, EngineError) as error:
            log.error("engine was not closed and may keep its memory", reason=str(error) or "no answer")
        self._is_closed = True

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class RestartingEngine:
    """An engine that is restarted after a crash.

    Requests wait for the next engine, and for its weights if the crashed one had some of the learner. Calls that
    concern weights raise UpdateFailed at a crash: they have to be repeated. Any other EngineError is final: there were
    too many crashes in a row.

    Attributes:
        requests_restarted: requests that lost all their tokens in a crash, and began again.
        prompt_tokens: of all answers, each with its whole prompt.
        cached_tokens: those of them that the engines had in their KV caches.
    """

    def __init__(self, engine: Engine, start: Start, config: RolloutConfig) -> None:
        """`engine` is the first one; `start` starts each of the others."""
        self._restarts = Restarts(engine, start, config.engine.give_up_after)
        self._max_tokens = config.sampling.max_tokens
        self._in_flight: set[asyncio.Timeout] = set()
        self._pressure = Pressure(kv_cache_usage=0.0, preemptions=0)
        self.requests_restarted = self.prompt_tokens = self.cached_tokens = 0

    @property
    def version(self) -> int:
        """The policy version that new tokens come from; 0 after every start, and while there is no engine."""
        return self._restarts.engine.version if self._restarts.alive else 0

    @property
    def shares_memory(self) -> bool:
        return self._restarts.engine.shares_memory

    @property
    def direct(self) -> DirectTransport | None:
        return self._restarts.engine.direct

    @property
    def device(self) -> torch.device:
        return self._restarts.engine.device

    @property
    def incarnation(self) -> str:
        """A new id after each start; empty while there is no engine."""
        return self._restarts.incarnation if self._restarts.alive else ""

    @property
    def ready(self) -> bool:
        """True if requests are answered now: an engine runs and does not wait for weights."""
        return self._restarts.alive and not self._restarts.awaits_weights

    @property
    def crashes(self) -> int:
        """Engines that crashed, were declared unusable, or failed to start."""
        return self._restarts.crashes

    # --- requests -------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> list[Completion]:
        """As `Engine.generate`, at several engines if need be."""
        return await self._answer(request, _now() + request.deadline_s)

    async def _answer(self, request: Request, until: float) -> list[Completion]:
        while True:
            try:
                async with asyncio.timeout_at(until):
                    await self._restarts.until(lambda: self.ready)
            except TimeoutError:
                return [NOTHING] * request.samples
            try:
                return await self._ask(replace(request, deadline_s=max(0.0, until - _now())))
            except RequestRefused:
                raise
            except EngineError as crash:
                if crash.unfinished is not None:
                    return await self._continue(request, crash.unfinished, until)
                self.requests_restarted += 1

    async def _ask(self, request: Request) -> list[Completion]:
        """Answers of the current engine. Raises: RequestRefused, EngineError when it crashes or is unusable."""
        engine = self._restarts.engine
        with request.tally.part() as tally:
            try:
                async with asyncio.timeout(None) as unusable:
                    self._in_flight.add(unusable)
                    answers = await engine.generate(replace(request, tally=tally))
            except RequestRefused:
                raise
            except EngineError as error:
                self._crashed(engine, str(error))
                tally.lose(ENGINE_CRASH, kept=_tokens(error.unfinished or ()))
                raise
            except TimeoutError:
                assert unusable.expired(), "engines answer at the deadline, without this error"
                tally.lose(ENGINE_CRASH)
                raise EngineError("the engine was declared unusable") from None
            finally:
                self._in_flight.discard(unusable)
            tally.add(_tokens(answers))
        self.prompt_tokens += len(request.prompt_ids) * sum(1 for answer in answers if answer.token_ids)
        self.cached_tokens += sum(answer.cached_tokens for answer in answers if answer.token_ids)
        if any(answer.finish_reason != "abort" for answer in answers):
            self._restarts.answered(engine)
        return answers

    async def _continue(self, request: Request, unfinished: Sequence[Completion], until: float) -> list[Completion]:
        """Finishes the answers of a crashed engine at the next one."""
        most = self._max_tokens if request.max_tokens is None else request.max_tokens

        async def finish(begun: Completion) -> Completion:
            if begun.finish_reason != "abort":
                return begun
            left = most - len(begun.token_ids)
            if left <= 0:
                return replace(begun, finish_reason="length")
            prompt_ids = [*request.prompt_ids, *begun.token_ids]
            (rest,) = await self._answer(replace(request, prompt_ids=prompt_ids, samples=1, max_tokens=left), until)
            return stitch(begun, rest)

        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(finish(begun)) for begun in unfinished]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # one reason is enough for a request
        return [answer.result() for answer in answers]

    # --- weights --------------------------------------------------------------------------------------------------

    async def join(self, group: Form) -> None:
        async with self._current() as engine:
            await engine.join(group)

    async def install(self, version: int, manifest: Manifest, tensors: TensorSource) -> float:
        async with self._current() as engine:
            stall_s = await engine.install(version, manifest, tensors)
        self._restarts.installed()
        return stall_s

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        async with self._current() as engine:
            return await engine.score(token_ids)

    async def checksums(self) -> dict[str, int] | None:
        async with self._current() as engine:
            return await engine.checksums()

    async def fail(self, reason: str) -> None:
        """Declares the current engine unusable: its answers in flight are discarded, and another engine starts."""
        # First: answers that closing cuts short must not be kept.
        discarded, self._in_flight = self._in_flight, set()
        for request in discarded:
            request.reschedule(_now())
        self._restarts.crashed(self._restarts.engine, reason, requests=len(discarded))

    @asynccontextmanager
    async def _current(self) -> AsyncIterator[Engine]:
        """The engine for a call that concerns weights. Raises: UpdateFailed when there is none, or it crashes."""
        self._restarts.check()
        if not self._restarts.alive:
            raise UpdateFailed("the engine crashed and is not restarted yet")
        engine = self._restarts.engine
        try:
            yield engine
        except (RequestRefused, UpdateFailed):
            raise
        except EngineError as error:
            self._crashed(engine, str(error))
            raise UpdateFailed(f"the engine crashed and is restarted: {error}") from error
        if engine is not self._restarts.engine or not self._restarts.alive:
            raise UpdateFailed("the engine crashed meanwhile and is restarted")

    async def pressure(self) -> Pressure:
        """The load of the engine, or its last known load when a running engine refuses; waits for a restart."""
        while True:
            await self._restarts.until(lambda: self._restarts.alive)
            engine = self._restarts.engine
            try:
                self._pressure = await engine.pressure()
            except RequestRefused as refusal:
                log.warning("engine refused to report its load", reason=str(refusal))
            except EngineError as error:
                self._crashed(engine, str(error))
                continue
            return self._pressure

    async def close(self) -> None:
        """Frees everything and cancels a restart."""
        await self._restarts.close()

    def _crashed(self, engine: Engine, reason: str) -> None:
        self._restarts.crashed(engine, reason, requests=len(self._in_flight))


def _tokens(answers: Iterable[Completion]) -> int:
    """Number of generated tokens."""
    return sum(len(answer.token_ids) for answer in answers)


def stitch(begun: Completion, rest: Completion) -> Completion:
    """Joins an unfinished answer and its continuation by the next engine; touching spans are merged."""
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
        routed_experts=rest.routed_experts,  # the prompt of the continuation is all that came before
        kept=[*(begun.kept or ()), *(rest.kept or ())] or None,
        cached_tokens=begun.cached_tokens,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
