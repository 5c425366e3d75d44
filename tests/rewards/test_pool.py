"""Scoring groups: inline and in real worker processes, with rewards that misbehave."""

import asyncio
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import psutil
import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.rewards.base import RewardFailed
from slipstream.rewards.runners.pool import Scorer
from slipstream.rewards.runners.worker import Scores
from tests.rewards.reward_plugins import NotToBePickled, NotToBeRead

PATIENCE_S = 60.0  # far above what anything here takes: a hang fails the test, a slow machine does not
SERVER = """
import asyncio, signal, sys
from contextlib import closing, suppress
from slipstream.rewards.runners.pool import Scorer

async def main():
    reward = "reward_plugins:starts_others_and_hangs"
    with closing(Scorer([reward], workers=1, deadline_s=600)) as scorer:
        await scorer.score(sys.argv[1:], "", {}, names=[reward])

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts aside with Ctrl-C ignored
with suppress(KeyboardInterrupt):
    asyncio.run(main())
"""
"""A process whose reward hangs, until it is killed."""
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
"""What rewards raise, and how that is shown."""


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(Path(__file__).parent)  # spawned workers inherit sys.path
        yield


@pytest.fixture(scope="module", params=[0, 1], ids=["inline", "worker"])
def scoring(request: pytest.FixtureRequest, _plugins: None) -> Iterator[Callable[..., Score]]:
    """Scores with these rewards of many, which one worker has loaded for all tests, or this process."""
    rewards = [plugin(name) for name in ("exact_match", "difference", "returns_what_it_is_told", *ERRORS)]
    with closing(Scorer(rewards, workers=request.param, deadline_s=PATIENCE_S)) as made:
        yield lambda *names: partial(made.score, names=[plugin(name) for name in names])


@contextmanager
def scorer(*names: str, workers: int, deadline_s: float = PATIENCE_S) -> Iterator[Score]:
    """Scores with all these rewards."""
    rewards = [plugin(name) for name in names]
    made = Scorer(rewards, workers=workers, deadline_s=deadline_s)
    try:
        yield partial(made.score, names=rewards)
    finally:
        made.close()


def plugin(name: str) -> str:
    return name if name.endswith("_match") else f"reward_plugins:{name}"


async def scored(made: Score, *answers: str, reference: str = "5") -> Scores:
    async with asyncio.timeout(PATIENCE_S):
        return await made(answers, reference, {})


async def failure(made: Score, *answers: str) -> RewardFailed:
    with pytest.raises(RewardFailed) as caught:
        await scored(made, *answers)
    return caught.value


def end(processes: list[int]) -> bool:
    """Whether all of them end soon."""
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


async def test_every_answer_gets_every_score(scoring: Callable[..., Score]) -> None:
    scores = await scoring("exact_match", "difference")(["5", "7"], "5", {"scale": 10})
    assert scores == [
        {"exact_match": 1.0, plugin("difference"): 0.0},
        {"exact_match": 0.0, plugin("difference"): 20.0},
    ]


async def test_evaluations_that_take_for_ever_leave_workers_to_those_that_are_trained_on() -> None:
    with scorer("hangs_if_asked", workers=2) as made:
        async with asyncio.TaskGroup() as hanging:
            evaluations = [hanging.create_task(made(["hang"], "5", {}, evaluation=True)) for _ in range(8)]
            await asyncio.sleep(0)  # they go first
            assert await scored(made, "a") == [{plugin("hangs_if_asked"): 1.0}]
            for evaluation in evaluations:
                evaluation.cancel()


async def test_workers_are_other_processes_and_inline_is_this_one() -> None:
    with scorer("process_id", workers=0) as inline, scorer("process_id", workers=1) as pooled:
        assert await scored(inline, "a") == [{plugin("process_id"): os.getpid()}]
        assert await scored(pooled, "a") != [{plugin("process_id"): os.getpid()}]


async def test_a_reward_that_raises_costs_its_group(scoring: Callable[..., Score]) -> None:
    made = scoring("exact_match", "difference")
    failed = await failure(made, "5", "x")
    assert failed.reason == "reward_error"
    assert failed.detail.startswith(f"{plugin('difference')}: ValueError: invalid literal for int()")
    assert len(await scored(made, "5", "6")) == 2, "the next group is scored"


@pytest.mark.parametrize(("answer", "shown"), [("nan", "nan"), ("text", "'1.0'"), ("none", "None")])
async def test_a_score_that_is_no_finite_number_costs_its_group(
    scoring: Callable[..., Score], answer: str, shown: str
) -> None:
    made = scoring("returns_what_it_is_told")
    failed = await failure(made, answer)
    assert failed.reason == "reward_error"
    assert f"returned {shown}, which is no finite number" in failed.detail
    assert await scored(made, "true") == [{plugin("returns_what_it_is_told"): 1.0}]


@pytest.mark.parametrize("name", ERRORS)
async def test_whatever_a_reward_raises_is_its_own_error(scoring: Callable[..., Score], name: str) -> None:
    failed = await failure(scoring(name), "a")
    assert failed.reason == "reward_error"
    assert failed.detail.startswith(f"{plugin(name)}: {ERRORS[name]}")


async def test_a_reward_that_hangs_costs_its_group_and_its_worker() -> None:
    with scorer("hangs_if_asked", workers=1, deadline_s=1.0) as made:
        failed = await failure(made, "fine", "hang")
        assert failed.reason == "reward_timeout"
        assert failed.detail == f"{plugin('hangs_if_asked')}: no scores within scoring.deadline_s=1"
        assert await scored(made, "fine") == [{plugin("hangs_if_asked"): 1.0}], "a new worker took over"


async def test_a_reward_that_is_stuck_in_c_is_ended_at_the_deadline_and_not_asked_first() -> None:
    with scorer("sticks_in_c_if_asked", workers=1, deadline_s=1.0) as made:
        await scored(made, "fine")  # the worker is up
        started_at = time.monotonic()
        assert (await failure(made, "hang")).reason == "reward_timeout"
        assert time.monotonic() - started_at < 3.5
        assert await scored(made, "fine") == [{plugin("sticks_in_c_if_asked"): 1.0}]


async def test_a_reward_whose_copy_goes_on_too_is_answered_once() -> None:
    with scorer("forks_and_lets_the_copy_return", workers=1) as made:
        for number in range(10):
            assert await scored(made, str(number)) == [{plugin("forks_and_lets_the_copy_return"): number}]


async def test_what_a_reward_has_started_ends_with_its_worker(tmp_path: Path) -> None:
    with scorer("starts_others_and_hangs", workers=1) as made:
        scoring = asyncio.create_task(made([str(tmp_path / "ids")], "", {}))
        processes = await asyncio.to_thread(named, tmp_path / "ids")
        assert all(map(runs, processes))
        scoring.cancel()  # its worker is killed, as at the deadline
        assert await asyncio.to_thread(end, processes)


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGKILL, False), (signal.SIGINT, True)])
def test_a_server_that_ends_leaves_no_worker_and_nothing_that_a_reward_has_started(
    tmp_path: Path, number: signal.Signals, to_group: bool
) -> None:
    command = [sys.executable, "-c", SERVER, str(tmp_path / "ids")]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with Popen(command, env={**os.environ, "PYTHONPATH": paths}, stderr=PIPE, start_new_session=True) as server:
        processes = named(tmp_path / "ids")
        assert all(map(runs, processes))
        os.kill(-server.pid if to_group else server.pid, number)
        _, printed = server.communicate(timeout=PATIENCE_S)
    assert end(processes)
    assert b"Traceback" not in printed


async def test_a_reward_that_kills_its_worker_costs_its_group_and_no_other() -> None:
    with scorer("dies_if_asked", workers=2) as made:
        groups = [("fine",), ("die",), ("fine",), ("fine",), ("die",), ("fine",)]
        results = await asyncio.gather(*(scored(made, *group) for group in groups), return_exceptions=True)
    told = [str(result) if isinstance(result, RewardFailed) else result for result in results]
    score = [{plugin("dies_if_asked"): 1.0}]
    crash = f"reward_crash: {plugin('dies_if_asked')}: the worker process ended with exit code 7"
    assert told == [score if group == ("fine",) else crash for group in groups]


async def test_a_worker_that_has_ended_between_two_groups_costs_neither() -> None:
    with scorer("process_id", workers=1) as made:
        ((first,),) = [scores.values() for scores in await scored(made, "a")]
        os.kill(int(first), signal.SIGKILL)
        assert await asyncio.to_thread(end, [int(first)])
        ((second,),) = [scores.values() for scores in await scored(made, "a")]
    assert first != second


async def test_a_worker_that_can_not_be_started_costs_its_group_and_no_other() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with scorer("exact_match", workers=1) as made:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            failed = await failure(made, "5")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert str(failed).startswith("reward_crash: exact_match: no worker process can be started: ")
        assert await scored(made, "5") == [{"exact_match": 1.0}]


@pytest.mark.parametrize(
    ("in_a_worker", "start_s", "failed"),
    [
        ("os._exit(9)", PATIENCE_S, "reward_crash: {}: the worker process ended with exit code 9"),
        ("threading.Event().wait()", 1.0, "reward_timeout: {}: no worker has loaded it within 1 s"),
    ],
    ids=["ends", "hangs"],
)
async def test_a_reward_that_a_worker_can_not_load_costs_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_worker: str, start_s: float, failed: str
) -> None:
    lines = ["import multiprocessing, os, threading", "if multiprocessing.parent_process():", f"    {in_a_worker}"]
    (tmp_path / "not_for_workers.py").write_text("\n".join([*lines, "def one(*_): return 1.0", ""]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("slipstream.rewards.runners.pool._START_S", start_s)
    reward = "not_for_workers:one"
    with closing(Scorer([reward], workers=2, deadline_s=PATIENCE_S)) as made:
        asking = [made.score(["a"], "", {}, names=[reward]) for _ in range(3)]
        for result in await asyncio.gather(*asking, return_exceptions=True):
            assert str(result).startswith(failed.format(reward))


@pytest.fixture
def slow_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A reward, its worker's id: a worker adds that to the file `loading`, and loads until there is a file so named."""
    lines = ["import multiprocessing, os, time", f"own, folder = os.getpid(), {str(tmp_path)!r}"]
    lines += ["if multiprocessing.parent_process():", "    open(f'{folder}/loading', 'a').write(f'{own}\\n')"]
    lines += ["    while not os.path.exists(f'{folder}/{own}'): time.sleep(0.01)", "def one(*_): return own", ""]
    (tmp_path / "slow_to_load.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    return "slow_to_load:one"


async def test_a_worker_goes_on_loading_when_the_group_that_waits_for_it_is_given_up(
    slow_to_load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rewards take longer to load than a group may take, no worker would ever come to it."""
    with closing(Scorer([slow_to_load], workers=1, deadline_s=PATIENCE_S)) as made:
        score = partial(made.score, ["a"], "", {}, names=[slow_to_load])
        given_up = asyncio.create_task(score())
        (worker,) = await asyncio.to_thread(named, tmp_path / "loading")
        given_up.cancel()
        await asyncio.wait([given_up])
        (tmp_path / str(worker)).touch()
        (still_there,) = made._workers
        assert await asyncio.to_thread(select.select, [still_there._socket], [], [], PATIENCE_S) != ([], [], [])
        monkeypatch.setattr("slipstream.rewards.runners.pool._START_S", 0.0)  # it is loaded
        async with asyncio.timeout(PATIENCE_S):
            assert await score() == [{slow_to_load: worker}]


async def test_a_worker_that_is_loaded_is_asked_before_one_that_still_loads(slow_to_load: str, tmp_path: Path) -> None:
    with closing(Scorer([slow_to_load], workers=2, deadline_s=PATIENCE_S)) as made:
        score = partial(made.score, ["a"], "", {}, names=[slow_to_load])
        first = asyncio.create_task(score())
        (loaded,) = await asyncio.to_thread(named, tmp_path / "loading")
        given_up = asyncio.create_task(score())
        await asyncio.sleep(0)
        (tmp_path / str(loaded)).touch()
        async with asyncio.timeout(PATIENCE_S):
            assert await first == [{slow_to_load: loaded}]
            given_up.cancel()
            await asyncio.wait([given_up])
            assert await score() == [{slow_to_load: loaded}]


async def test_more_groups_than_workers_are_all_scored() -> None:
    with scorer("exact_match", workers=2) as made:
        results = await asyncio.gather(*(scored(made, "5", str(number)) for number in range(50)))
    assert [result[1]["exact_match"] for result in results] == [float(number == 5) for number in range(50)]


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        (lambda answer: 1.0, "the task's info can't be sent to a worker: .*lambda"),
        (NotToBePickled(), r"the task's info can't be sent to a worker: ValueError: stays here"),
        (NotToBeRead(), r"a worker can't read the task's info: ValueError: .*not a number"),
    ],
    ids=["lambda", "not-to-be-pickled", "not-to-be-read"],
)
async def test_info_that_can_not_be_sent_to_a_worker_costs_its_group_and_no_other(value: object, detail: str) -> None:
    with scorer("exact_match", workers=1) as made:
        innocent = asyncio.create_task(scored(made, "5"))
        with pytest.raises(RewardFailed, match=f"reward_error: {detail}"):
            await made(["5"], "5", {"value": value}, names=["exact_match"])
        assert len(await innocent) == 1
        assert len(await scored(made, "5")) == 1


async def test_cancelling_a_score_frees_its_worker() -> None:
    with scorer("hangs_if_asked", workers=1) as made:
        await scored(made, "fine")  # the worker is up, so that the next group is in it when the time is out
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await made(["hang"], "", {})
        assert len(await scored(made, "fine")) == 1


async def test_a_group_that_nobody_waits_for_any_more_is_not_scored(scoring: Callable[..., Score]) -> None:
    made = scoring("exact_match")
    with pytest.raises(RewardFailed, match=r"scoring_timeout: .* raise scoring\.workers"):
        await made(["5"], "5", {}, until=asyncio.get_running_loop().time())
    assert len(await scored(made, "5")) == 1


async def test_a_group_waits_for_a_worker_only_as_long_as_time_is_left_for_its_scores() -> None:
    loop = asyncio.get_running_loop()
    with scorer("hangs_if_asked", workers=1) as made:
        ahead = [asyncio.create_task(made(["hang"], "", {})) for _ in range(2)]
        await asyncio.sleep(0)
        until = loop.time() + 4.0
        with pytest.raises(RewardFailed, match="scoring_timeout"):
            await made(["fine"], "", {}, until=until)
        assert loop.time() < until
        for each in ahead:
            each.cancel()
        await asyncio.wait(ahead)


def test_a_reward_that_does_not_exist_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="there is no reward 'exact_mach'"):
        Scorer(["exact_mach"], workers=1, deadline_s=1.0)


async def test_a_run_scores_its_terms_and_its_evaluation() -> None:
    config = RunConfig.model_validate(
        {
            "model": {"build": "digits"},
            "rewards": [{"name": "digit_match"}],
            "eval": {"reward": "exact_match"},
            "scoring": {"workers": 0},
        }
    )
    made = Scorer.from_config(config)
    assert await made.score(["12"], "13", {}, names=["digit_match"]) == [{"digit_match": 0.5}]
    assert await made.score(["12"], "13", {}, names=["exact_match"]) == [{"exact_match": 0.0}]
    made.close()
