"""An engine in a thread of its own: what is asked of it between two steps, and how it ends."""

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
    """Waits at `gate`, when it is closed, as it loads and at every step; answers what runs, if it `finishes`."""

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
        self.closed.wait(0.001)  # a step takes its time
        if self.failure is not None:
            raise self.failure
        finished = [(request, f"{request} whole") for request in self.running if self.finishes]
        self.running = [] if self.finishes else self.running
        return finished

    def abort(self, request: str) -> str | None:
        if request not in self.running:
            return None
        self.running.remove(request)
        return f"{request} cut short"

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


async def test_requests_are_answered_when_they_finish_or_at_their_deadline() -> None:
    engine = ByHand(finishes=False)
    thread = await thread_of(engine)
    late, patient = ask(thread, engine, "late", deadline_s=0.0), ask(thread, engine, "patient")
    assert await late == "late cut short"
    await thread.call(lambda: setattr(engine, "finishes", True))
    assert await patient == "patient whole"
    await thread.close()
    assert engine.closed.is_set()


async def test_a_request_that_is_cancelled_is_ended_and_one_that_is_refused_costs_nobody_else() -> None:
    engine = ByHand(finishes=False)
    thread = await thread_of(engine)

    def refuse() -> None:
        raise RequestRefused("too long")

    asking = ask(thread, engine)
    await until(engine.steps.is_set)
    asking.cancel()
    await until(lambda: engine.idle)
    with pytest.raises(RequestRefused, match="too long"):
        await thread.request("two", refuse, deadline_s=None)
    await thread.close()


async def test_a_call_that_nobody_waits_for_any_more_is_not_made() -> None:
    """What it was to work on may be gone, as the memory of an update that was given up is."""
    engine, made = ByHand(finishes=False), list[str]()
    thread = await thread_of(engine)
    engine.gate.clear()
    ask(thread, engine)
    await until(engine.steps.is_set)
    given_up = asyncio.ensure_future(thread.call(lambda: made.append("given up")))
    await asyncio.sleep(0)  # it waits for the step to end
    given_up.cancel()
    await asyncio.wait([given_up])
    engine.gate.set()
    await thread.call(lambda: made.append("next"))
    assert made == ["next"]
    engine.finishes = True
    await thread.close()


async def test_an_update_that_fails_leaves_the_engine_alive_and_any_other_error_of_a_call_ends_it() -> None:
    def fail(error: Exception) -> Callable[[], None]:
        def raises() -> None:
            raise error

        return raises

    engine = ByHand(finishes=False)
    thread = await thread_of(engine)
    with pytest.raises(UpdateFailed, match="no such tensor"):
        await thread.call(fail(UpdateFailed("no such tensor")))
    asking = ask(thread, engine)
    await until(lambda: not engine.idle)
    with pytest.raises(EngineError, match="the engine crashed: EngineError\\('half of it'\\)"):
        await thread.call(fail(EngineError("half of it")))
    with pytest.raises(EngineError, match="half of it") as death:
        await asking
    assert death.value.unfinished == [completion([7], finish_reason="abort")]
    await until(engine.closed.is_set)
    for call in (ask(thread, engine, "two"), thread.call(lambda: None)):
        with pytest.raises(EngineError, match="half of it"):
            await call


@pytest.mark.parametrize("failure", [ConfigError("model.path is wrong"), OSError("no such file")])
async def test_a_start_that_fails_says_why(failure: Exception) -> None:
    with pytest.raises(ConfigError if isinstance(failure, ConfigError) else EngineError, match=str(failure)):
        await thread_of(ByHand(failure=failure))


@pytest.mark.parametrize("why", ["too late", "cancelled"])
async def test_an_engine_whose_start_nobody_waits_for_any_more_ends_as_soon_as_it_is_loaded(why: str) -> None:
    engine = ByHand()
    engine.gate.clear()
    thread = EngineThread("the engine", engine.loaded, deadline_s=DEADLINE_S)
    starting = asyncio.ensure_future(thread.start(deadline_s=0.01 if why == "too late" else DEADLINE_S))
    await asyncio.sleep(0)  # it begins
    if why == "cancelled":
        starting.cancel()
    with pytest.raises(EngineError if why == "too late" else asyncio.CancelledError):
        await starting
    engine.gate.set()
    await until(engine.closed.is_set)


async def test_an_engine_that_hangs_counts_as_dead_and_nobody_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ByHand()
    thread = await thread_of(engine, deadline_s=0.1)
    engine.gate.clear()
    asking = ask(thread, engine)
    await until(engine.steps.is_set)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineError, match=r"the engine did not answer within 0\.1 s"):
            await thread.call(lambda: None)
        for call in (asking, ask(thread, engine, "two"), thread.call(lambda: None)):
            with pytest.raises(EngineError, match="did not answer") as silence:
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
