"""Supervisor of child processes: they and all their descendants end with it, however it ends. Linux only."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.configs.runtime import processes as guard
from slipstream.configs.runtime.errors import DeadlineError
from slipstream.configs.runtime.processes import die_with_parent, kill_members, living_members, signal_members
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.launch.standby import Standby

MARKER = "SLIPSTREAM_SUPERVISED"
"""Variable in the environment of children and their descendants."""
_TOKEN = f"{os.getpid()}-{time.time_ns()}"
GRACE_S = 30.0
REAP_S = 5.0
"""Covers the delay between the end of a process's last thread and its reaping."""


@dataclass(frozen=True)
class Child:
    """A supervised process: the leader of a session and process group of its own."""

    name: str
    process: subprocess.Popen[bytes]
    console: Path
    """File of the process's output, after that of earlier processes of this name."""
    console_start: int
    """Offset of its own output, in bytes."""
    grace_s: float
    """Time between SIGTERM and SIGKILL."""
    team: str
    """Children of one team are stopped at once."""
    started_at: float
    """By the monotonic clock."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self.process.poll()

    @property
    def ending(self) -> str:
        """A description of its end."""
        code = self.exit_code
        if code is None:
            return "still running"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def last_lines(self, count: int) -> list[str]:
        """The last lines of its output; fewer if the file was rotated."""
        with contextlib.suppress(FileNotFoundError), self.console.open("rb") as lines:
            truncated = os.fstat(lines.fileno()).st_size < self.console_start  # by log rotation
            lines.seek(0 if truncated else self.console_start)
            return [line.decode(errors="replace").rstrip("\n") for line in deque(lines, maxlen=count)]
        return []


class Supervisor:
    """Starts and stops children; the end of its `with` block stops all that still run.

    If the supervisor itself is killed, its guard process kills the children and their descendants, and frees their
    shared memory and temporary files.
    """

    def __init__(self, logs: Path, signals: StopSignals) -> None:
        """The output of children goes to `<logs>/<name>.console`."""
        self.children: dict[str, Child] = {}
        self._logs = logs
        self._signals = signals

    def __enter__(self) -> "Supervisor":
        self._guard = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(Path(guard.__file__)), f"{MARKER}={_TOKEN}:", "then"),
                *(sys.executable, "-P", "-m", "slipstream.tools.launch.leftovers"),
            ],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop_all()
        finally:
            assert self._guard.stdin is not None, "the guard was started with a pipe"
            self._guard.stdin.close()
            self._guard.wait()

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        withheld: Collection[str] = (),
        grace_s: float = GRACE_S,
        team: str | None = None,
        cores: Collection[int] = (),
        ahead: Standby | None = None,
    ) -> Child:
        """Starts a child without a shell, with the supervisor's environment, less `withheld`, and additions.

        Args:
            team: None: its name.
            cores: those that it is bound to; empty: the supervisor's.
            ahead: the process that becomes this child, unless it has ended.
        """
        console = self._logs / f"{name}.console"
        with console.open("ab") as output:
            console_start = output.tell()
            if ahead is not None and ahead.start(command, environment or {}, output, cores):
                process = ahead.process
            else:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=child_environment(name, environment or {}, withheld=withheld),
                    start_new_session=True,
                    preexec_fn=_prepared(cores),  # noqa: PLW1509 - this process has one thread while it starts children
                )
        self._notify_guard(f"+{process.pid}\n")
        now = time.monotonic()
        self.children[name] = Child(name, process, console, console_start, grace_s, team or name, now)
        return self.children[name]

    def ended(self) -> list[Child]:
        """Children that ended without `stop`, in the order of their start."""
        return [child for child in self.children.values() if child.exit_code is not None]

    def stop_all(self) -> None:
        """Stops all children, the team that was started last first."""
        teams: dict[str, list[str]] = {}
        for child in self.children.values():
            teams.setdefault(child.team, []).append(child.name)
        self._stop_in_order(reversed(teams.values()))

    def stop(self, *names: str) -> None:
        """Stops these children and their descendants, one after the other; unknown names are skipped.

        Another Ctrl-C or SIGTERM ends the grace of all.

        Raises: DeadlineError, once all others are stopped, with the processes that SIGKILL did not end.
        """
        self._stop_in_order([name] for name in names)

    def stop_together(self, names: Iterable[str], *, grace_s: float | None = None) -> None:
        """As `stop`, but at once, and with another grace if given."""
        self._stop_in_order([names], grace_s=grace_s)

    def _stop_in_order(self, teams: Iterable[Iterable[str]], *, grace_s: float | None = None) -> None:
        stops_before = self._signals.stop_count
        stuck: list[int] = []
        for names in teams:
            children = [self.children.pop(name) for name in names if name in self.children]
            for child in children:
                signal_members(*self._members(child), signal.SIGTERM)
            began = time.monotonic()
            for child in children:
                deadline = began + (child.grace_s if grace_s is None else grace_s)
                while living_members(*self._members(child)):
                    if time.monotonic() > deadline or self._signals.stop_count > stops_before:
                        stuck += kill_members(*self._members(child))
                        break
                    self._signals.wait(0.02)
                with contextlib.suppress(subprocess.TimeoutExpired):  # it is stuck then
                    child.process.wait(REAP_S)
                self._notify_guard(f"-{child.process.pid}\n")
        if stuck:
            raise DeadlineError(f"processes {stuck} still run after SIGKILL; `ps -o stat,wchan` shows the reason")

    def _members(self, child: Child) -> tuple[set[int], bytes]:
        """The process group of a child, and the marker of its descendants."""
        return {child.process.pid}, os.fsencode(f"{MARKER}={marker(child.name)}")

    def _notify_guard(self, line: str) -> None:
        assert self._guard.stdin is not None, "the guard was started with a pipe"
        # If the guard was killed, the children must still be stopped.
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(line.encode())
            self._guard.stdin.flush()


def marker(name: str) -> str:
    """Value of `MARKER` for a child of this process."""
    return f"{_TOKEN}:{name};"


def child_environment(name: str, environment: Mapping[str, str], *, withheld: Collection[str]) -> dict[str, str]:
    """Environment of a child: this process's, less `withheld`, additions, and the marker."""
    inherited = {key: value for key, value in os.environ.items() if key not in withheld}
    return {**inherited, **environment, MARKER: marker(name)}


def _prepared(cores: Collection[int]) -> Callable[[], None]:
    """`preexec_fn` of a child that dies with this process and is bound to these cores."""
    ask_kernel = die_with_parent()

    def prepare() -> None:
        ask_kernel()
        if cores:
            os.sched_setaffinity(0, cores)

    return prepare
