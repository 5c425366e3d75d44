"""Processes that import their modules ahead of a start."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.launch.standby import Standby
from slipstream.tools.launch.supervise import Child, Supervisor, child_environment
from tests.tools.run_command import demo_config

pytestmark = pytest.mark.timeout(120)

# Records what it was given, and when it was loaded.
PROCESS = """
import json, os, sys
loaded = []
def load(config):
    loaded.append(config.run.name)
    {load}
def main():
    names = ("AT_START", "LATER", "WITHHELD", "SLIPSTREAM_SUPERVISED")
    environment = {{name: os.environ.get(name) for name in names}}
    print(json.dumps([loaded, sys.argv[1:], environment, sorted(os.sched_getaffinity(0)), os.getsid(0)]), flush=True)
    sys.exit(7)
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with StopSignals() as signals, Supervisor(tmp_path, signals) as started:
        yield started


def standby(folder: Path, monkeypatch: pytest.MonkeyPatch, *, load: str = "pass") -> Standby:
    """A process that waits, of PROCESS."""
    (folder / "recording.py").write_text(PROCESS.format(load=load))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("WITHHELD", "secret")
    environment = child_environment("learner", {"AT_START": "1"}, withheld=["WITHHELD"])
    return Standby("recording", demo_config(folder), environment)


def start(supervisor: Supervisor, ahead: Standby | None, core: int) -> Child:
    """The child that the process becomes."""
    command = [sys.executable, "-P", "-m", "recording", "config.yaml", "--undo-steps"]
    child = supervisor.start("learner", command, {"LATER": "2"}, withheld=["WITHHELD"], cores=[core], ahead=ahead)
    assert child.process.wait(60) == 7
    return child


@pytest.mark.parametrize("load", ["pass", "import absent_module", "sys.exit(3)"], ids=["loads", "fails", "exits"])
def test_process_that_imported_ahead_becomes_the_child(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    core = min(os.sched_getaffinity(0))
    with standby(tmp_path, monkeypatch, load=load) as ahead:
        child = start(supervisor, ahead, core)
        assert child.process is ahead.process
    (line,) = child.last_lines(5)
    loaded, arguments, environment, cores, session = json.loads(line)
    assert loaded == ["demo"]
    assert arguments == ["config.yaml", "--undo-steps"]
    assert environment.pop("SLIPSTREAM_SUPERVISED").endswith(":learner;")
    assert environment == {"AT_START": "1", "LATER": "2", "WITHHELD": None}
    assert cores == [core]
    assert session == child.process.pid


def test_one_that_was_killed_is_replaced(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with standby(tmp_path, monkeypatch) as ahead:
        ahead.process.kill()
        ahead.process.wait(60)
        child = start(supervisor, ahead, min(os.sched_getaffinity(0)))
        assert child.process is not ahead.process
    assert json.loads(child.last_lines(1)[0])[0] == []


def test_one_that_is_not_started_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with standby(tmp_path, monkeypatch) as ahead:
        assert ahead.process.poll() is None
    assert ahead.process.poll() == -signal.SIGKILL


def test_one_that_is_stopped_during_its_imports_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imports = "from slipstream.configs.runtime.signals import heavy_imports, signal"
    with standby(tmp_path, monkeypatch, load=f"{imports}\n    with heavy_imports(): signal.raise_signal(15)") as ahead:
        assert ahead.process.wait(60) == 128 + signal.SIGTERM
