"""Runners: in this process and in real worker processes, with rewards that misbehave."""

import asyncio
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import psutil
import pytest

from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Failure, Result
from slipstream.rewards.runners.base import InlineRunner, Runner
from slipstream.rewards.runners.pool import PoolRunner
from tests.rewards.episodes import NOTHING, episode
from tests.rewards.reward_plugins import MakesFolder

PATIENCE_S = 60.0  # far above what anything here takes: a hang fails the test, a slow machine does not
SERVER = """
import asyncio, signal, sys
from contextlib import closing, suppress
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.runners.pool import PoolRunner
from tests.rewards.episodes import episode

async def main():
    reward = "reward_plugins:starts_others_and_hangs"
    with closing(PoolRunner([RewardConfig(name=reward)], workers=1, deadline_s=600)) as runner:
        await runner.score(runner.rewards[reward].calls(1), [episode(sys.argv[1])])

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts aside with Ctrl-C ignored
with suppress(KeyboardInterrupt):
    asyncio.run(main())
"""
"""A process whose reward hangs, until it is killed."""
Scores = dict[str, list[float | str]]
"""By reward, the value of each answer; the reason of a failure."""
Score = Callable[..., Coroutine[Any, Any, Scores]]
ERRORS = {
    "raises_a_timeout": "TimeoutError: the judge did not answer",
    "raises_what_can_not_be_pickled": "LocalError",
    "leaves": "SystemExit: 3",
    "cancels": "CancelledError",
    "interrupts": "KeyboardInterrupt",
    "panics": "Panic: index out of bounds",
    "raises_what_can_not_be_read": "Mute: (its message can't be read: TypeError)",
}
"""The error's text by the reward that raises it."""


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(Path(__file__).parents[1])  # spawned workers inherit sys.path
        yield


@pytest.fixture(scope="module", params=[0, 1], ids=["inline", "worker"])
def runner(request: pytest.FixtureRequest, _plugins: None) -> Iterator[Runner]:
    """Many rewards, which one worker has loaded for all tests, or this process."""
    rewards = [plugin(name) for name in ("exact_match", "difference", "judged", "rank", *ERRORS)]
    with closing(build(rewards, workers=request.param)) as built:
        yield built


@contextmanager
def pool(*names: str, workers: int, deadline_s: float = PATIENCE_S) -> Iterator[Score]:
    """Scores with all these rewards."""
    rewards = [plugin(name) for name in names]
    with closing(build(rewards, workers=workers, deadline_s=deadline_s)) as runner:
        yield partial(scored, runner, rewards)


def build(names: Sequence[str], *, workers: int, deadline_s: float = PATIENCE_S) -> Runner:
    terms = [RewardConfig(name=name) for name in names]
    if workers:
        return PoolRunner(terms, workers=workers, deadline_s=deadline_s)
    return InlineRunner(terms, deadline_s=deadline_s)


def plugin(name: str) -> str:
    return name if name.endswith("_match") else f"reward_plugins:{name}"


async def results(
    runner: Runner, names: Sequence[str], *answers: str, info: Mapping[str, Any] = NOTHING
) -> dict[str, list[Result]]:
    """By reward, the result of each answer."""
    calls = [call for name in names for call in runner.rewards[name].calls(len(answers))]
    async with asyncio.timeout(PATIENCE_S):
        found = await runner.score(calls, [episode(answer, info=info) for answer in answers])
    columns: dict[str, list[Result]] = {name: [] for name in names}
    for call, column in zip(calls, found, strict=True):
        columns[call.name] += column
    return {name.removeprefix("reward_plugins:"): column for name, column in columns.items()}


async def scored(runner: Runner, names: Sequence[str], *answers: str, info: Mapping[str, Any] = NOTHING) -> Scores:
    found = await results(runner, names, *answers, info=info)
    return {
        name: [each.reason if isinstance(each, Failure) else each.value for each in column]
        for name, column in found.items()
    }


async def failure(runner: Runner, name: str, answer: str = "a") -> Failure:
    ((failed,),) = (await results(runner, [name], answer)).values()
    assert isinstance(failed, Failure)
    return failed


def end(processes: list[int]) -> bool:
    """Whether all of them end in time."""
    deadline = time.monotonic() + PATIENCE_S
    while any(map(runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(runs, processes))


def runs(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def named(file: Path) -> list[int]:
    """The processes that a line in the file names, once it is there."""
    deadline = time.monotonic() + PATIENCE_S
    while not (file.exists() and file.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [int(process) for process in file.read_text().split()]


async def test_every_episode_gets_every_score(runner: Runner) -> None:
    names = [plugin(name) for name in ("exact_match", "difference", "rank", "judged")]
    scores = await scored(runner, names, "5", "4", info={"scale": 10})
    assert scores == {"exact_match": [1.0, 0.0], "difference": [0.0, 10.0], "rank": [1.0, 0.0], "judged": [1.0, 1.0]}


async def test_worker_is_another_process_with_one_event_loop() -> None:
    with pool("process_id", workers=0) as inline:
        assert await inline("a") == {"process_id": [os.getpid()]}
    names = ("counts_event_loops", "forks_and_lets_the_copy_return", "process_id", "runs_its_own_loop")
    with pool(*names, workers=1) as score:
        workers = set()
        for number in range(10):
            found = await score(str(number))
            assert found["counts_event_loops"] == found["runs_its_own_loop"] == [1.0]
            assert found["forks_and_lets_the_copy_return"] == [number], "the copy sends no reply"
            workers |= set(found["process_id"])
        assert len(workers) == 1
        assert os.getpid() not in workers


@pytest.mark.parametrize("name", ERRORS)
async def test_any_error_of_a_reward_is_a_failure(runner: Runner, name: str) -> None:
    failed = await failure(runner, plugin(name))
    assert failed.reason == "reward_error"
    assert failed.detail.startswith(f"{plugin(name)}: {ERRORS[name]}")


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("hangs_if_asked", 1), ("sticks_in_c_if_asked", 1), ("hangs_in_the_loop_if_asked", 1),
        ("hangs_in_the_loop_if_asked", 0),
    ],
)  # fmt: skip
async def test_hanging_call_costs_its_episode(name: str, workers: int) -> None:
    with pool(name, workers=workers, deadline_s=2.0) as score:
        assert await score("fine", "hang", "fine") == {name: [1.0, "reward_timeout", 1.0]}


async def test_waiting_for_a_worker_is_no_part_of_a_call() -> None:
    with pool("takes_a_while", workers=1, deadline_s=2.0) as score:
        groups = await asyncio.gather(*(score("a", "b", "c", "d") for _ in range(3)))  # 2.4 s, four calls each
    assert groups == [{"takes_a_while": [1.0] * 4}] * 3


async def test_calls_without_results_in_time_fail() -> None:
    with closing(build([plugin("hangs_if_asked"), plugin("judged")], workers=1)) as built:
        await scored(built, [plugin("hangs_if_asked")], "fine")  # the worker is up
        calls = [call for reward in built.rewards.values() for call in reward.calls(3)]
        subjects = [episode(answer) for answer in ("fine", "hang", "fine")]
        until = asyncio.get_running_loop().time() + 3.0
        found = [each for column in await built.score(calls, subjects, until=until) for each in column]
    outcomes = [each.reason if isinstance(each, Failure) else each.value for each in found]
    assert outcomes == [1.0, "scoring_timeout", "scoring_timeout", 1.0, 1.0, 1.0]


async def test_waiting_async_rewards_delay_no_other_group() -> None:
    with pool("hangs_in_the_loop_if_asked", "exact_match", workers=1) as score:
        waiting = [asyncio.create_task(score("hang")) for _ in range(16)]
        await asyncio.sleep(0)  # they start first
        assert await score("5") == {"hangs_in_the_loop_if_asked": [1.0], "exact_match": [1.0]}
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert await score("6") == {"hangs_in_the_loop_if_asked": [1.0], "exact_match": [0.0]}


@pytest.mark.parametrize(
    ("name", "answer", "reason"),
    [("blocks_the_loop_if_asked", "block", "reward_crash"), ("dies_in_the_loop_if_asked", "die", "reward_crash")],
)
async def test_failing_async_worker_is_replaced(
    monkeypatch: pytest.MonkeyPatch, name: str, answer: str, reason: str
) -> None:
    monkeypatch.setattr("slipstream.rewards.runners.shared._CANCEL_S", 1.0)
    with pool(name, workers=1, deadline_s=2.0) as score:
        assert await score("fine") == {name: [1.0]}
        assert await score(answer) == {name: [reason]}
        assert await score("fine") == {name: [1.0]}


async def test_processes_that_a_reward_started_end_with_its_worker(tmp_path: Path) -> None:
    with pool("starts_others_and_hangs", workers=1) as score:
        scoring = asyncio.create_task(score(str(tmp_path / "ids")))
        processes = await asyncio.to_thread(named, tmp_path / "ids")
        assert all(map(runs, processes))
        scoring.cancel()  # its worker is killed, as at the deadline
        assert await asyncio.to_thread(end, processes)


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGKILL, False), (signal.SIGINT, True)])
def test_workers_and_their_processes_end_with_the_server(
    tmp_path: Path, number: signal.Signals, to_group: bool
) -> None:
    command = [sys.executable, "-c", SERVER, str(tmp_path / "ids")]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    with Popen(command, env={**os.environ, "PYTHONPATH": paths}, stderr=PIPE, start_new_session=True) as server:
        processes = named(tmp_path / "ids")
        assert all(map(runs, processes))
        os.kill(-server.pid if to_group else server.pid, number)
        _, printed = server.communicate(timeout=PATIENCE_S)
    assert end(processes)
    assert b"Traceback" not in printed


async def test_crashed_worker_costs_one_episode() -> None:
    with pool("dies_if_asked", workers=2) as score:
        groups = await asyncio.gather(score("fine", "die", "fine"), score("die"), score("fine"))
    crash, one = "reward_crash", 1.0
    assert [group["dies_if_asked"] for group in groups] == [[one, crash, one], [crash], [one]]


async def test_a_worker_that_ended_between_groups_is_replaced() -> None:
    with pool("process_id", workers=1) as score:
        (first,) = (await score("a"))["process_id"]
        os.kill(int(first), signal.SIGKILL)
        assert await asyncio.to_thread(end, [int(first)])
        assert (await score("a"))["process_id"] != [first]


async def test_worker_that_can_not_start_fails_its_group_only() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pool("exact_match", workers=1) as score:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            failed = await score("5")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert failed == {"exact_match": ["reward_crash"]}
        assert await score("5") == {"exact_match": [1.0]}


@pytest.mark.parametrize(
    ("in_a_worker", "start_s", "reason", "detail"),
    [
        ("os._exit(9)", PATIENCE_S, "reward_crash", "exit code 9"),
        ("threading.Event().wait()", 1.0, "reward_timeout", "within 1 s"),
    ],
    ids=["ends", "hangs"],
)
async def test_reward_that_fails_to_load_fails_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_worker: str, start_s: float, reason: str, detail: str
) -> None:
    lines = ["import multiprocessing, os, threading", "if multiprocessing.parent_process():", f"    {in_a_worker}"]
    (tmp_path / "not_for_workers.py").write_text("\n".join([*lines, "def one(answer, reference, info): return 1.0"]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("slipstream.rewards.runners.pool.START_S", start_s)
    with closing(build(["not_for_workers:one"], workers=2)) as built:
        for result in await asyncio.gather(*(failure(built, "not_for_workers:one") for _ in range(3))):
            assert (result.reason, detail in result.detail) == (reason, True)


@pytest.fixture
def slow_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A reward, its worker's id: a worker adds that to the file `loading`, and loads until there is a file so named."""
    lines = ["import multiprocessing, os, time", f"own, folder = os.getpid(), {str(tmp_path)!r}"]
    lines += ["if multiprocessing.parent_process():", "    open(f'{folder}/loading', 'a').write(f'{own}\\n')"]
    lines += ["    while not os.path.exists(f'{folder}/{own}'): time.sleep(0.01)"]
    lines += ["def one(answer, reference, info): return own", ""]
    (tmp_path / "slow_to_load.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    return "slow_to_load:one"


async def test_a_worker_goes_on_loading_after_its_group_is_cancelled(
    slow_to_load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no worker would ever be loaded, where that takes longer than a group's deadline."""
    with closing(PoolRunner([RewardConfig(name=slow_to_load)], workers=1, deadline_s=PATIENCE_S)) as runner:
        score = partial(scored, runner, [slow_to_load], "a")
        cancelled = asyncio.create_task(score())
        (worker,) = await asyncio.to_thread(named, tmp_path / "loading")
        cancelled.cancel()
        await asyncio.wait([cancelled])
        (tmp_path / str(worker)).touch()
        (kept,) = runner._workers
        assert await asyncio.to_thread(select.select, [kept._socket], [], [], PATIENCE_S) != ([], [], [])
        monkeypatch.setattr("slipstream.rewards.runners.pool.START_S", 0.0)  # it is loaded
        assert await score() == {slow_to_load: [worker]}


async def test_loaded_workers_are_used_before_loading_ones(slow_to_load: str, tmp_path: Path) -> None:
    with closing(PoolRunner([RewardConfig(name=slow_to_load)], workers=2, deadline_s=PATIENCE_S)) as runner:
        score = partial(scored, runner, [slow_to_load], "a")
        first = asyncio.create_task(score())
        (loaded,) = await asyncio.to_thread(named, tmp_path / "loading")
        cancelled = asyncio.create_task(score())
        await asyncio.sleep(0)
        (tmp_path / str(loaded)).touch()
        assert await first == {slow_to_load: [loaded]}
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert await score() == {slow_to_load: [loaded]}


async def test_info_beyond_plain_values_fails_its_group_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a worker would make a folder
    with pool("exact_match", workers=1) as score:
        for value in (lambda answer: 1.0, MakesFolder("made"), 2**70, "\ud800", {1: 2}):
            innocent = asyncio.create_task(score("5"))
            info = value if isinstance(value, dict) else {"value": value}
            assert await score("5", info=info) == {"exact_match": ["reward_error"]}
            assert await innocent == await score("5") == {"exact_match": [1.0]}
    assert not list(tmp_path.iterdir())


async def test_invalid_reply_is_not_unpickled(tmp_path: Path) -> None:
    names = [plugin(name) for name in ("sends_a_pickle", "sends_other_scores")]
    with closing(build(names, workers=1)) as built:
        for name in names:
            failed = await failure(built, name, str(tmp_path / "made"))
            assert (failed.reason, "reply" in failed.detail) == ("reward_crash", True)
        assert not list(tmp_path.iterdir())


async def test_cancelling_a_score_frees_its_worker() -> None:
    with pool("hangs_if_asked", workers=1) as score:
        await score("fine")  # the worker is up, so that the next group is in it at the deadline
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await score("hang")
        assert await score("fine") == {"hangs_if_asked": [1.0]}
