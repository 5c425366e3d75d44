"""A thread that steps an in-process engine; all calls into the engine run there, between two steps."""

import asyncio
import queue
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.rollout_servers.engines.base import Completion, EngineError, RequestRefused, UpdateFailed

log = get_log("rollout.engine")

Command = Callable[[], None]
Unfinished = Mapping[Any, list[Completion] | None]
"""Answers so far of the requests of a crashed engine; None, or no entry, where they are unknown."""

Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)
Value = TypeVar("Value")


class Stepped(Protocol[Key, Answer_co]):
    """An engine that runs step by step; each request has a key."""

    @property
    def idle(self) -> bool:
        """True if no request is left."""
        ...

    def step(self) -> Sequence[tuple[Key, Answer_co]]:
        """Generates one token of each running sequence. Returns the requests that this finishes, with their answers."""
        ...

    def abort(self, request: Key) -> Answer_co | None:
        """Ends a request. Returns its answer so far, None if it had finished and is forgotten."""
        ...

    def unfinished(self, requests: Sequence[Key]) -> Unfinished:
        """Answers so far of requests, when no more steps follow."""
        ...


class EngineThread(Generic[Key, Answer]):
    """Steps an engine and resolves requests in one event loop."""

    def __init__(
        self, name: str, load: Callable[[], AbstractContextManager[Stepped[Key, Answer]]], *, deadline_s: float
    ) -> None:
        """`name`: the engine in errors; `load`: entered and left in the thread.

        An engine that does not get to a call within `deadline_s` counts as crashed.
        """
        self._name = name
        self._load = load
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._requests: dict[Key, asyncio.Future[Answer]] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._crash: str | None = None
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self, *, deadline_s: float) -> None:
        """Loads the engine. Raises: ConfigError; EngineError when that fails, or takes longer than the deadline."""
        self._thread.start()
        try:
            async with asyncio.timeout(deadline_s):
                await self._started
        except (TimeoutError, asyncio.CancelledError) as ended:
            self._commands.put(None)
            if isinstance(ended, asyncio.CancelledError):
                raise
            raise EngineError(f"{self._name} did not start within {deadline_s:.0f} s") from None

    async def request(self, key: Key, add: Command, *, deadline_s: float | None) -> Answer:
        """The answer to a request, which `add` passes to the engine; aborted at the deadline and by cancelling.

        Raises: RequestRefused as `add` does, EngineError.
        """
        self.check_alive()
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._requests[key] = answer
        self._commands.put(partial(self._add, answer, add))
        timer = None if deadline_s is None else self._loop.call_later(deadline_s, self._abort_later, key)
        try:
            return await answer
        except asyncio.CancelledError:
            self._abort_later(key)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            del self._requests[key]

    async def call(self, function: Callable[[], Value]) -> Value:
        """The result of `function`, called in the thread.

        Raises: UpdateFailed as it does; EngineError when the engine crashes, as after any other error, or hangs.
        """
        self.check_alive()
        result: asyncio.Future[Value] = self._loop.create_future()
        self._calls.add(result)
        self._commands.put(partial(self._call, result, function))
        try:
            async with asyncio.timeout(self._deadline_s):
                return await result
        except TimeoutError:
            self._fail(f"{self._name} did not answer within {self._deadline_s:g} s", {})
            raise EngineError(str(self._crash)) from None
        finally:
            self._calls.discard(result)

    def check_alive(self) -> None:
        """Raises: EngineError when the engine has crashed."""
        if self._crash is not None:
            raise EngineError(self._crash)

    async def close(self) -> None:
        """Ends the thread; pending requests and calls fail."""
        self._commands.put(None)
        await run_in_thread(self._thread.join)

    def _abort_later(self, key: Key) -> None:
        self._commands.put(partial(self._abort, key))

    # --- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with ExitStack() as loaded:
            try:
                self._engine = loaded.enter_context(self._load())
            except ConfigError as error:
                self._in_loop(_set_exception, self._started, error)
                return
            except Exception as error:  # noqa: BLE001  (engines raise anything, and `start` waits for the outcome)
                self._in_loop(_set_exception, self._started, EngineError(f"{self._name} did not start: {error!r}"))
                return
            self._in_loop(_set_result, self._started, None)
            reason = self._serve()
            unfinished: Unfinished = {}
            try:
                unfinished = self._engine.unfinished(list(self._requests))
            finally:
                self._in_loop(self._fail, reason, unfinished)
                del self._engine

    def _serve(self) -> str:
        """Steps until the engine is closed or crashes. Returns the reason of its end."""
        try:
            while True:
                idle = self._engine.idle
                while idle or not self._commands.empty():
                    command = self._commands.get()
                    if command is None:
                        return f"{self._name} was closed"
                    command()
                    idle = False
                finished = self._engine.step()
                if finished:
                    self._in_loop(self._resolve, finished)
        except Exception as error:  # engines raise anything, and each pending request has to fail
            log.exception("engine crashed")
            return f"{self._name} crashed: {error!r}"

    def _add(self, answer: asyncio.Future[Answer], add: Command) -> None:
        try:
            add()
        except RequestRefused as error:
            self._in_loop(_set_exception, answer, error)

    def _abort(self, key: Key) -> None:
        answer = self._engine.abort(key)
        if answer is not None:
            self._in_loop(self._resolve, [(key, answer)])

    def _call(self, result: asyncio.Future[Any], function: Callable[[], Any]) -> None:
        if result.cancelled():  # its arguments may be gone
            return
        try:
            self._in_loop(_set_result, result, function())
        except UpdateFailed as error:  # the engine is unchanged
            self._in_loop(_set_exception, result, error)

    def _in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    # --- in the event loop ----------------------------------------------------------------------------------------

    def _resolve(self, finished: Sequence[tuple[Key, Answer]]) -> None:
        for key, answer in finished:
            if key in self._requests:
                _set_result(self._requests[key], answer)

    def _fail(self, reason: str, unfinished: Unfinished) -> None:
        self._crash = self._crash or reason
        for key, answer in self._requests.items():
            _set_exception(answer, EngineError(self._crash, unfinished.get(key)))
        for call in self._calls:
            _set_exception(call, EngineError(self._crash))


def _set_result(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
