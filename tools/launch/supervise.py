"""Child processes that never outlive their supervisor, nor leave children of their own behind. Linux only."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.configs.runtime import processes as guard
from slipstream.configs.runtime.errors import DeadlineError
from slipstream.configs.runtime.processes import die_with_parent, kill_members, living_members, signal_members
from slipstream.configs.runtime.signals import StopSignals

MARKER = "SLIPSTREAM_SUPERVISED"
GRACE_S = 30.0
REAP_S = 5.0
"""A process whose last thread has ended is not to be reaped at once."""


@dataclass(frozen=True)
class Child:
    """A supervised process: the leader of a session and process group of its own."""

    name: str
    process: subprocess.Popen[bytes]
    console: Path
    """All that it prints, after what earlier processes of this name printed."""
    console_start: int
    """Where its own part begins, in bytes."""
    grace_s: float
    """How long it may take to end between SIGTERM and SIGKILL."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self.process.poll()

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self.exit_code
        if code is None:
            return "still running"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def last_lines(self, count: int) -> list[str]:
        """The last lines that it printed, as far as they are still there."""
        with contextlib.suppress(FileNotFoundError), self.console.open("rb") as lines:
            begun_anew = os.fstat(lines.fileno()).st_size < self.console_start  # as rotation by truncation leaves it
            lines.seek(0 if begun_anew else self.console_start)
            return [line.decode(errors="replace").rstrip("\n") for line in deque(lines, maxlen=count)]
        return []


class Supervisor:
    """Starts children and stops them; leaving its `with` block stops whatever still runs.

    Should the supervisor itself be killed, its guard process kills the children and all that they started.
    """

    def __init__(self, logs: Path, signals: StopSignals) -> None:
        """Children print to `<logs>/<name>.console`."""
        self.children: dict[str, Child] = {}
        self._logs = logs
        self._signals = signals
        self._token = f"{os.getpid()}-{time.time_ns()}"

    def __enter__(self) -> "Supervisor":
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__)), f"{MARKER}={self._token}:"],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is not meant for it
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
        grace_s: float = GRACE_S,
    ) -> Child:
        """Starts a child with the supervisor's environment and the given additions, without a shell."""
        console = self._logs / f"{name}.console"
        with console.open("ab") as output:
            console_start = output.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {}), MARKER: f"{self._token}:{name};"},
                start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - the supervisor runs one thread while it starts children
            )
        self._tell_guard(f"+{process.pid}\n")
        self.children[name] = Child(name, process, console, console_start, grace_s)
        return self.children[name]

    def ended(self) -> list[Child]:
        """Children that ended by themselves, in the order of their start."""
        return [child for child in self.children.values() if child.exit_code is not None]

    def stop_all(self) -> None:
        """Ends all children as `stop` does, the one that was started last first."""
        self.stop(*reversed(self.children))

    def stop(self, *names: str) -> None:
        """Ends these children one after the other, with all that they started; unknown names are skipped.

        A further Ctrl-C or SIGTERM meanwhile ends the grace of all.

        Raises: DeadlineError naming the processes that not even SIGKILL ended, once all others are stopped.
        """
        asked = self._signals.stop_count
        stuck: list[int] = []
        for name in names:
            child = self.children.pop(name, None)
            if child is None:
                continue
            groups, marker = {child.process.pid}, os.fsencode(f"{MARKER}={self._token}:{name};")
            signal_members(groups, marker, signal.SIGTERM)
            deadline = time.monotonic() + child.grace_s
            while living_members(groups, marker):
                if time.monotonic() > deadline or self._signals.stop_count > asked:
                    stuck += kill_members(groups, marker)
                    break
                self._signals.wait(0.02)
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is one of the stuck
                child.process.wait(REAP_S)
            self._tell_guard(f"-{child.process.pid}\n")
        if stuck:
            raise DeadlineError(f"processes {stuck} go on after SIGKILL; see `ps -o stat,wchan` for what they wait on")

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None, "the guard was started with a pipe"
        # A guard that someone killed must not keep us from stopping the children ourselves.
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(line.encode())
            self._guard.stdin.flush()
