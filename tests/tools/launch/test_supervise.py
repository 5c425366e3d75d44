"""Children and their descendants end with their supervisor, however it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.launch.supervise import Supervisor
from tests.tools.run_command import until

# A child that starts two children, one of them outside of its process group, and prints their ids.
FAMILY = """
import subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(600)"]
near, far = subprocess.Popen(command), subprocess.Popen(command, start_new_session=True)
print("ids", near.pid, far.pid, flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
print("ids", flush=True)
time.sleep(600)
"""
# A supervisor in a process of its own: starts FAMILY and STUBBORN, then waits for a signal.
SUPERVISOR = """
import sys
from pathlib import Path
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.launch.supervise import Supervisor
with StopSignals() as signals, Supervisor(Path(sys.argv[1]), signals) as supervisor:
    for name, code in (("family", sys.argv[2]), ("stubborn", sys.argv[3])):
        print(supervisor.start(name, [sys.executable, "-c", code], grace_s=0.2).process.pid, flush=True)
    while not signals.received:
        signals.wait(600)
sys.exit(128 + signals.received[0])
"""


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def printed_ids(console: Path) -> list[int] | None:
    """The ids that a child has printed; None before that."""
    if console.exists() and "\n" in (text := console.read_text()):
        return [int(word) for word in text.split()[1:]]
    return None


@contextmanager
def running_supervisor(logs: Path, *before: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A supervisor and the ids of all four processes below it."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", SUPERVISOR, str(logs), FAMILY, STUBBORN],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            assert process.stdout is not None
            pids = [int(process.stdout.readline()) for _ in range(2)]
            until(lambda: printed_ids(logs / "stubborn.console") is not None)
            until(lambda: printed_ids(logs / "family.console") is not None)
            pids += printed_ids(logs / "family.console") or []
            assert len(pids) == 4
            assert all(runs(pid) for pid in pids)
            yield process, pids
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def terminal() -> Iterator[None]:
    """SIGHUP has its default action, even if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_supervisor_leaves_no_descendant(tmp_path: Path, number: signal.Signals) -> None:
    with running_supervisor(tmp_path) as (supervisor, pids):
        assert all(os.getpgid(pid) != supervisor.pid for pid in pids)
        os.killpg(supervisor.pid, number)  # as a terminal does
        assert supervisor.wait(60) == 128 + number
    assert not [pid for pid in pids if runs(pid)]


def test_nohup_ignores_the_end_of_the_terminal(tmp_path: Path) -> None:
    with running_supervisor(tmp_path, "nohup") as (supervisor, _):
        supervisor.send_signal(signal.SIGHUP)
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(60) == 128 + signal.SIGTERM


def test_killed_supervisor_leaves_no_descendant(tmp_path: Path) -> None:
    with running_supervisor(tmp_path) as (supervisor, pids):
        supervisor.kill()
        assert supervisor.wait(60) == -signal.SIGKILL
    until(lambda: not any(runs(pid) for pid in pids))


def test_killed_supervisor_leaves_no_shared_memory(tmp_path: Path) -> None:
    owner = (
        "import time\nfrom slipstream.buffer.wire.weights.layout import Segment\n"
        "segment = Segment('guarded', 10)\nprint(segment.path, flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path), owner, "import time; time.sleep(600)"]
    console = tmp_path / "family.console"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as supervisor:
        until(lambda: console.exists() and console.read_text().endswith("\n"))
        segment = Path(console.read_text().strip())
        assert segment.exists()
        supervisor.kill()
    until(lambda: not segment.exists())


def test_team_stops_at_once_and_with_a_grace_of_its_own(tmp_path: Path) -> None:
    waits_for_the_other = """
import os, signal, sys, time
def end(number, frame):
    os.close(os.open(sys.argv[1], os.O_WRONLY if sys.argv[2] == "a" else os.O_RDONLY))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ids", flush=True)
time.sleep(600)
"""
    os.mkfifo(tmp_path / "pipe")  # it opens once both have it open
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        team = [
            supervisor.start(
                name, [sys.executable, "-c", waits_for_the_other, str(tmp_path / "pipe"), name], team="team"
            )
            for name in "ab"
        ]
        stubborn = supervisor.start("c", [sys.executable, "-c", STUBBORN])
        until(lambda: all(printed_ids(tmp_path / f"{name}.console") is not None for name in "abc"))
        supervisor.stop_together(["c"], grace_s=0.1)
        supervisor.stop_all()
    assert stubborn.ending == "signal SIGKILL"
    assert [child.ending for child in team] == ["exit code 0"] * 2


def test_child_is_bound_to_its_cores(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    code = "import os; print('ids', *os.sched_getaffinity(0))"
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        supervisor.start("bound", [sys.executable, "-c", code], cores=[core])
        until(lambda: printed_ids(tmp_path / "bound.console") is not None)
    assert printed_ids(tmp_path / "bound.console") == [core]


def test_children_stop_in_the_given_order(tmp_path: Path) -> None:
    writes_its_name = """
import signal, sys, time
def end(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write(sys.argv[2])
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ids", flush=True)
time.sleep(600)
"""
    order = tmp_path / "order"
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        for name in "abc":
            supervisor.start(name, [sys.executable, "-c", writes_its_name, str(order), name])
        until(lambda: all(printed_ids(tmp_path / f"{name}.console") is not None for name in "abc"))
        supervisor.stop("b", "nobody", "c", "a")
    assert order.read_text() == "bca"


@pytest.mark.parametrize(
    ("further", "takes_s", "ending"), [(signal.SIGHUP, 0.3, "exit code 0"), (signal.SIGINT, 600, "signal SIGKILL")]
)
def test_second_ctrl_c_ends_the_grace_and_a_hangup_does_not(
    tmp_path: Path, further: signal.Signals, takes_s: float, ending: str
) -> None:
    signals_its_parent = """
import os, signal, sys, time
def end(number, frame):
    os.kill(os.getppid(), int(sys.argv[1]))
    time.sleep(float(sys.argv[2]))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ids", flush=True)
time.sleep(600)
"""
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        child = supervisor.start("slow", [sys.executable, "-c", signals_its_parent, str(int(further)), str(takes_s)])
        until(lambda: printed_ids(tmp_path / "slow.console") is not None)
        os.kill(os.getpid(), signal.SIGHUP)
        supervisor.stop("slow")
    assert signals.received == [signal.SIGHUP, further]
    assert child.ending == ending


def test_dead_child_has_its_ending_and_last_lines(tmp_path: Path) -> None:
    talker = "import os\nfor n in range(30): print('line', n, flush=True)\nos.kill(os.getpid(), 11)"
    (tmp_path / "quick.console").write_text("output of an earlier start\n")
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        supervisor.start("quick", [sys.executable, "-c", "import sys; sys.exit('no model there')"])
        supervisor.start("talker", [sys.executable, "-c", talker])
        until(lambda: len(supervisor.ended()) == 2)
        quick, talker_child = supervisor.ended()
    assert quick.ending == "exit code 1"
    assert quick.last_lines(20) == ["no model there"]
    assert talker_child.ending == "signal SIGSEGV"
    assert talker_child.last_lines(20) == [f"line {n}" for n in range(10, 30)]


@pytest.mark.parametrize(("rotated", "last"), [("truncated", ["after"]), ("renamed", [])])
def test_last_lines_survive_rotation_as_far_as_possible(tmp_path: Path, rotated: str, last: list[str]) -> None:
    console, go_on = tmp_path / "talker.console", tmp_path / "go_on"
    console.write_text("output of an earlier start\n")
    os.mkfifo(go_on)
    talker = "import sys; print('before', flush=True); open(sys.argv[1]).read(); print('after')"
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        child = supervisor.start("talker", [sys.executable, "-c", talker, str(go_on)])
        until(lambda: child.last_lines(1) == ["before"])
        if rotated == "truncated":
            console.write_text("")
        else:
            console.rename(tmp_path / "talker.console.1")
        go_on.write_text("")
        until(lambda: child.exit_code is not None)
        assert child.last_lines(20) == last


def test_children_of_a_dead_child_are_stopped(tmp_path: Path) -> None:
    orphaner = FAMILY.rpartition("time.sleep")[0]
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        child = supervisor.start("orphaner", [sys.executable, "-c", orphaner])
        until(lambda: child.exit_code is not None)
        pids = printed_ids(tmp_path / "orphaner.console") or []
        assert [runs(pid) for pid in pids] == [True, True]
    assert [runs(pid) for pid in pids] == [False, False]


def test_wait_returns_when_a_child_ends(tmp_path: Path) -> None:
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        child = supervisor.start("brief", [sys.executable, "-c", "pass"])
        began = time.monotonic()
        while child.exit_code is None:
            signals.wait(60)
        assert time.monotonic() - began < 30
