"""The thread that an engine of this process lives in: whatever touches the engine runs there, between two steps."""

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
LeftBehind = Mapping[Any, list[Completion] | None]
"""What the requests of a dead engine had come to; None, or no entry, where that is not known."""

Request = TypeVar("Request", bound=Hashable)
Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)
Value = TypeVar("Value")


class Stepped(Protocol[Request, Answer_co]):
    """An engine that is stepped by hand."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to step for."""
        ...

    def step(self) -> Sequence[tuple[Request, Answer_co]]:
        """One token for all that run, if any do; the requests that are finished by it, with their answers."""
        ...

    def cut_short(self, request: Request) -> Answer_co | None:
        """Ends a request; what it has come to. None if it had finished and is not known any more."""
        ...

    def left_behind(self, requests: Sequence[Request]) -> LeftBehind:
        """What unanswered requests have come to, when no more steps follow."""
        ...


class EngineThread(Generic[Request, Answer]):
    """Steps an engine, and tells one event loop what comes of it."""

    def __init__(
        self, name: str, load: Callable[[], AbstractContextManager[Stepped[Request, Answer]]], *, deadline_s: float
    ) -> None:
        """`name` stands for the engine in errors; `load` is entered and left in the thread.

        An engine that does not get to a call within `deadline_s` counts as dead.
        """
        self._name = name
        self._load = load
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._requests: dict[Request, asyncio.Future[Answer]] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._death: str | None = None
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

    async def ask(self, request: Request, add: Command, *, deadline_s: float | None) -> Answer:
        """The answer to a request, which `add` hands to the engine; it is cut short at the deadline, or by cancelling.

        Raises: RequestRefused as `add` does, EngineError.
        """
        self.check_alive()
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._requests[request] = answer
        self._commands.put(partial(self._add, answer, add))
        cut = None if deadline_s is None else self._loop.call_later(deadline_s, self._cut_short, request)
        try:
            return await answer
        except asyncio.CancelledError:
            self._cut_short(request)
            raise
        finally:
            if cut is not None:
                cut.cancel()
            del self._requests[request]

    async def call(self, function: Callable[[], Value]) -> Value:
        """What `function` returns in the thread.

        Raises: UpdateFailed as it does; EngineError when the engine dies, as it does of any other error, or is silent.
        """
        self.check_alive()
        result: asyncio.Future[Value] = self._loop.create_future()
        self._calls.add(result)
        self._commands.put(partial(self._obey, result, function))
        try:
            async with asyncio.timeout(self._deadline_s):
                return await result
        except TimeoutError:
            self._die(f"{self._name} did not answer within {self._deadline_s:g} s", {})
            raise EngineError(str(self._death)) from None
        finally:
            self._calls.discard(result)

    def check_alive(self) -> None:
        """Raises: EngineError when the engine is dead."""
        if self._death is not None:
            raise EngineError(self._death)

    async def close(self) -> None:
        """Ends the thread; whoever still waits hears of it."""
        self._commands.put(None)
        await run_in_thread(self._thread.join)

    def _cut_short(self, request: Request) -> None:
        self._commands.put(partial(self._end, request))

    # --- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with ExitStack() as loaded:
            try:
                self._engine = loaded.enter_context(self._load())
            except ConfigError as error:
                self._tell(_set_exception, self._started, error)
                return
            except Exception as error:  # noqa: BLE001  (whatever an engine raises must reach the waiting server)
                self._tell(_set_exception, self._started, EngineError(f"{self._name} did not start: {error!r}"))
                return
            self._tell(_set_result, self._started, None)
            reason = self._serve()
            left_behind: LeftBehind = {}
            try:
                left_behind = self._engine.left_behind(list(self._requests))
            finally:
                self._tell(self._die, reason, left_behind)
                del self._engine

    def _serve(self) -> str:
        """Returns why it ended."""
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
                    self._tell(self._resolve, finished)
        except Exception as error:
            log.exception("engine died")
            return f"{self._name} died: {error!r}"

    def _add(self, answer: asyncio.Future[Answer], add: Command) -> None:
        try:
            add()
        except RequestRefused as error:
            self._tell(_set_exception, answer, error)

    def _end(self, request: Request) -> None:
        answer = self._engine.cut_short(request)
        if answer is not None:
            self._tell(self._resolve, [(request, answer)])

    def _obey(self, result: asyncio.Future[Any], function: Callable[[], Any]) -> None:
        if result.cancelled():  # what it was to work on may be gone
            return
        try:
            self._tell(_set_result, result, function())
        except UpdateFailed as error:  # nothing was touched: the engine lives on
            self._tell(_set_exception, result, error)

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is there to hear it
            self._loop.call_soon_threadsafe(function, *arguments)

    # --- told by it -----------------------------------------------------------------------------------------------

    def _resolve(self, finished: Sequence[tuple[Request, Answer]]) -> None:
        for request, answer in finished:
            if request in self._requests:
                _set_result(self._requests[request], answer)

    def _die(self, reason: str, left_behind: LeftBehind) -> None:
        self._death = self._death or reason
        for request, answer in self._requests.items():
            _set_exception(answer, EngineError(self._death, left_behind.get(request)))
        for call in self._calls:
            _set_exception(call, EngineError(self._death))


def _set_result(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
