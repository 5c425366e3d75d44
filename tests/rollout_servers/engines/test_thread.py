"""An engine in its thread: requests, calls between two steps, and its end."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import Completion, EngineError, RequestRefused, UpdateFailed
from slipstream.rollout_servers.engines.thread import EngineThread
from tests.rollout_servers.engines.mortal import DEADLINE_S, until
from tests.rollout_servers.scripted import completion


@dataclass
class ByHand:
    """Waits for `gate` when it loads and at every step; finishes all requests at a step, if it `finishes`."""

    finishes: bool = True
    running: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    steps: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def idle(self) -> bool:
        return not self.running

    def add(self, request: str) -> None:
        self.running.append(request)

    def step(self) -> list[tuple[str, str]]:
        self.steps.set()
        self.gate.wait()
        self.closed.wait(0.001)  # a step takes time
        finished = [(request, f"{request} finished") for request in self.running if self.finishes]
        self.running = [] if self.finishes else self.running
        return finished

    def abort(self, request: str) -> str | None:
        if request not in self.running:
            return None
        self.running.remove(request)
        return f"{request} aborted"

    def unfinished(self, requests: Sequence[str]) -> dict[str, list[Completion] | None]:
        return {request: [completion([7], finish_reason="abort")] for request in requests if request in self.running}

    @contextmanager
    def loaded(self) -> Iterator["ByHand"]:
        self.gate.wait()
        if self.failure is not None:
            raise self.failure
        yield self
        self.closed.set()


async def thread_of(engine: ByHand, *, deadline_s: float = DEADLINE_S) -> EngineThread[str, str]:
    thread = EngineThread("the engine", engine.loaded, deadline_s=deadline_s)
    await thread.start(deadline_s=DEADLINE_S)
    return thread


def ask(
    thread: EngineThread[str, str], engine: ByHand, request: str = "one", deadline_s: float | None = None
) -> "asyncio.Future[str]":
    return asyncio.ensure_future(thread.request(request, lambda: engine.add(request), deadline_s=deadline_s))


def failing(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


async def test_requests_end_when_finished_or_at_their_deadline() -> None:
    engine = ByHand(finishes=False)
    thread = await thread_of(engine)
    late, patient = ask(thread, engine, "late", deadline_s=0.0), ask(thread, engine, "patient")
    assert await late == "late aborted"
    await thread.call(lambda: setattr(engine, "finishes", True))
    assert await patient == "patient finished"
    await thread.close()
    assert engine.closed.is_set()


async def test_cancelled_request_is_aborted_and_refused_one_fails_alone() -> None:
    engine = ByHand(finishes=False)
    thread = await thread_of(engine)
    asking = ask(thread, engine)
    await until(engine.steps.is_set)
    asking.cancel()
    await until(lambda: engine.idle)
    with pytest.raises(RequestRefused, match="too long"):
        await thread.request("two", failing(RequestRefused("too long")), deadline_s=None)
    await thread.close()


async def test_cancelled_call_is_not_made() -> None:
    engine, made = ByHand(finishes=False), list[str]()
    thread = await thread_of(engine)
    engine.gate.clear()
    ask(thread, engine)
    await until(engine.steps.is_set)
    cancelled = asyncio.ensure_future(thread.call(lambda: made.append("cancelled")))
    await asyncio.sleep(0)  # it waits for the end of the step
    cancelled.cancel()
    await asyncio.wait([cancelled])
    engine.gate.set()
    await thread.call(lambda: made.append("next"))
    assert made == ["next"]
    engine.finishes = True
    await thread.close()


async def test_failed_update_is_no_crash_any_other_error_is() -> None:
    engine = ByHand(finishes=False)
    thread = await thread_of(engine)
    with pytest.raises(UpdateFailed, match="no such tensor"):
        await thread.call(failing(UpdateFailed("no such tensor")))
    asking = ask(thread, engine)
    await until(lambda: not engine.idle)
    with pytest.raises(EngineError, match=r"the engine .*half of it"):
        await thread.call(failing(EngineError("half of it")))
    with pytest.raises(EngineError, match="half of it") as crash:
        await asking
    assert crash.value.unfinished == [completion([7], finish_reason="abort")]
    await until(engine.closed.is_set)
    for call in (ask(thread, engine, "two"), thread.call(lambda: None)):
        with pytest.raises(EngineError, match="half of it"):
            await call


@pytest.mark.parametrize("failure", [ConfigError("model.path is wrong"), OSError("no such file")])
async def test_failed_start_has_its_reason(failure: Exception) -> None:
    with pytest.raises(ConfigError if isinstance(failure, ConfigError) else EngineError, match=str(failure)):
        await thread_of(ByHand(failure=failure))


@pytest.mark.parametrize(("deadline_s", "error"), [(0.01, EngineError), (DEADLINE_S, asyncio.CancelledError)])
async def test_late_or_cancelled_start_ends_the_engine(deadline_s: float, error: type[BaseException]) -> None:
    engine = ByHand()
    engine.gate.clear()
    thread = EngineThread("the engine", engine.loaded, deadline_s=DEADLINE_S)
    starting = asyncio.ensure_future(thread.start(deadline_s=deadline_s))
    await asyncio.sleep(0)  # it begins
    if error is asyncio.CancelledError:
        starting.cancel()
    with pytest.raises(error):
        await starting
    engine.gate.set()
    await until(engine.closed.is_set)


async def test_hanging_engine_is_a_crash_and_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ByHand()
    thread = await thread_of(engine, deadline_s=0.1)
    engine.gate.clear()
    asking = ask(thread, engine)
    await until(engine.steps.is_set)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineError, match=r"0\.1 s"):
            await thread.call(lambda: None)
        for call in (asking, ask(thread, engine, "two"), thread.call(lambda: None)):
            with pytest.raises(EngineError, match=r"0\.1 s") as silence:
                await call
            assert silence.value.unfinished is None

    # At the end of the process the loop waits for the threads of its executor.
    executor = ThreadPoolExecutor()
    monkeypatch.setattr(executor, "submit", lambda *_: pytest.fail("the loop would wait for this"))
    asyncio.get_running_loop().set_default_executor(executor)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await thread.close()
    engine.gate.set()
