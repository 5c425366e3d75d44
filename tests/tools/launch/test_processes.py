"""Processes of a run that end: which are started again, and when the run ends."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.configs.runtime.errors import CERTAIN
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.launch.machine import Machine
from slipstream.tools.launch.placement import place
from slipstream.tools.launch.processes import DASHBOARD, MODULES, ChildDied, RunProcesses
from slipstream.tools.launch.restarts import MOST_ALIKE
from slipstream.tools.launch.supervise import Supervisor
from tests.tools.run_command import demo_config, until

pytestmark = pytest.mark.timeout(300)

ENDS_AS_ORDERED = """
import os, sys
from pathlib import Path
name = os.environ["SLIPSTREAM_PROCESS"]
folder = Path(sys.argv[1]).parent
with (folder / f"{name}.starts").open("a") as starts:
    starts.write(" ".join([os.environ.get("RANK", "-"), *sys.argv[2:]]) + "\\n")
os.mkfifo(own := folder / f"{name}.{os.getpid()}")
sys.exit(int(own.read_text()))
"""
"""A process that records its start, and ends with the exit code that it gets."""


class Run:
    """A run of two rollout servers and two ranks, whose processes end as a test wants."""

    def __init__(self, folder: Path, processes: RunProcesses, supervisor: Supervisor) -> None:
        self.folder = folder
        self.processes = processes
        self.supervisor = supervisor

    def end(self, name: str, code: int = 1) -> None:
        """Ends a process with an exit code."""
        child = self.supervisor.children[name]
        order = self.folder / f"{name}.{child.process.pid}"
        until(order.exists)
        order.write_text(str(code))
        child.process.wait(60)

    def keep_running(self, *, step: int = 1, after_s: float = 0.0) -> list[str]:
        """As `RunProcesses.keep_running`, some time after the process that ended was started."""
        newest = max(child.started_at for child in self.supervisor.children.values())
        return self.processes.keep_running(step=step, now=newest + after_s)

    def starts(self, name: str) -> list[str]:
        """Rank and options of each start."""
        file = self.folder / f"{name}.starts"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """All processes but Redis, started."""
    with running(tmp_path, monkeypatch, servers=2) as started:
        yield started


@contextmanager
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, servers: int) -> Iterator[Run]:
    """A run whose processes were started."""
    (tmp_path / "ordered.py").write_text(ENDS_AS_ORDERED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for role in MODULES:
        monkeypatch.setitem(MODULES, role, "ordered")
    config = demo_config(tmp_path, f"rollout.servers={servers}", "learner.ranks=2", "redis.url=redis://127.0.0.1:1")
    config.paths.logs.mkdir(parents=True)
    with StopSignals() as signals, Supervisor(config.paths.logs, signals) as supervisor:
        processes = RunProcesses(config, place(Machine((0, 1)), config), supervisor, started_at=0.0)
        processes.start_others(undo_steps=True)
        yield Run(config.paths.root, processes, supervisor)


def test_failed_server_returns_after_its_delay(run: Run) -> None:
    run.end("rollout-1")
    (message,) = run.keep_running()
    assert "rollout-1" in message
    assert "exit code 1" in message
    assert run.keep_running(after_s=0.5) == []
    assert "rollout-1" not in run.supervisor.children
    run.keep_running(after_s=1.5)
    until(lambda: len(run.starts("rollout-1")) == 2)
    assert run.processes.restarts == {"rollout-1": 1}
    assert len(run.starts("rollout")) <= 1


@pytest.mark.parametrize("step", [0, 1])
def test_end_of_the_dashboard_never_ends_the_run(run: Run, step: int) -> None:
    assert run.processes.start_dashboard().startswith("http://127.0.0.1:")
    dashboard = run.supervisor.children[DASHBOARD]
    dashboard.process.kill()
    dashboard.process.wait(60)
    (message,) = run.keep_running(step=step)
    assert str(dashboard.console) in message
    assert run.keep_running(step=step) == []
    assert DASHBOARD not in run.supervisor.children


def test_server_that_fails_alike_stays_down_while_another_lives(run: Run) -> None:
    for _ in range(MOST_ALIKE - 1):
        run.end("rollout")
        run.keep_running()
        run.keep_running(after_s=100.0)
    run.end("rollout")
    (message,) = run.keep_running()
    assert "stays down" in message
    run.keep_running(after_s=100.0)
    assert "rollout" not in run.supervisor.children
    assert "rollout-1" in run.supervisor.children


def test_run_ends_when_its_last_server_stays_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, monkeypatch, servers=1) as run:
        for _ in range(MOST_ALIKE - 1):
            run.end("rollout")
            run.keep_running()
            run.keep_running(after_s=100.0)
        run.end("rollout")
        with pytest.raises(ChildDied, match="rollout"):
            run.keep_running()


def test_buffer_that_always_fails_ends_the_run(run: Run) -> None:
    for _ in range(MOST_ALIKE - 1):
        run.end("buffer")
        run.keep_running()
        run.keep_running(after_s=50.0)
    run.end("buffer")
    with pytest.raises(ChildDied, match="buffer"):
        run.keep_running()


@pytest.mark.parametrize(
    ("name", "code", "step"),
    [("rollout", 1, 0), ("buffer", CERTAIN, 7), ("rollout-1", CERTAIN, 7), ("learner-1", CERTAIN, 7)],
    ids=["before the first step", "buffer", "rollout", "learner"],
)
def test_certain_failure_ends_the_run_at_once(run: Run, name: str, code: int, step: int) -> None:
    run.end(name, code)
    with pytest.raises(ChildDied, match=name):
        run.keep_running(step=step)


def test_failed_rank_restarts_the_learner_once(run: Run) -> None:
    until(lambda: run.starts("learner") == ["0 --undo-steps"])
    os.kill(run.supervisor.children["learner-1"].process.pid, signal.SIGKILL)
    run.supervisor.children["learner-1"].process.wait(60)
    (message,) = run.keep_running(step=5)
    assert "learner-1 ended with signal SIGKILL" in message
    assert "step 5" in message
    until(lambda: run.starts("learner")[1:] == ["0"] and run.starts("learner-1")[-1:] == ["1"])
    assert run.processes.restarts == {"learner": 1}
    run.end("learner")
    with pytest.raises(ChildDied, match="learner"):
        run.keep_running(step=6)


def test_learner_restarts_again_from_a_later_checkpoint(run: Run) -> None:
    checkpoints = run.folder / "checkpoints"
    for step in (10, 20):
        (checkpoints / f"step-{step:06}").mkdir(parents=True)
        run.end("learner")
        assert len(run.keep_running(step=step + 5)) == 1
    assert run.processes.restarts == {"learner": 2}


def test_run_is_done_once_all_ranks_are(run: Run) -> None:
    run.end("learner-1", 0)
    assert not run.processes.is_done
    assert run.keep_running() == []
    run.end("learner", 0)
    assert run.processes.is_done


def test_error_in_the_log_distinguishes_failures(run: Run) -> None:
    for number in range(MOST_ALIKE + 1):
        run.processes.record("rollout", {"level": "error", "event": "failed", "error": "ab"[number % 2]})
        run.end("rollout")
        (message,) = run.keep_running()
        assert "stays down" not in message
        run.keep_running(after_s=200.0)
