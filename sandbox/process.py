"""One process under bubblewrap, the kernel's limits and a user without rights: its start, its outputs, its end.

It is the first process of its namespace. The kernel then ignores signals that it sends itself and has no handler for,
and its own SIGKILL ends it by SIGSYS (see `seccomp`): one that a SIGKILL has ended was killed from outside, or by its
limit of CPU seconds, which its CPU time shows.
"""

import fcntl
import math
import os
import platform
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.processes import kill_members
from slipstream.sandbox.inside import start
from slipstream.sandbox.seccomp import syscall_filter

Ended = Literal["exit", "cpu", "memory", "processes", "files", "output", "wall", "killed"]

FIRST_USER: Final = 200_000
"""User id of the first program that runs at a time under root, a range that distributions leave free."""
START_S: Final = 60.0
"""Until an interpreter runs a program: it depends on the machine's load alone."""
STARTED: Final = b"started\n"
_POLL_S: Final = 0.1  # until a cancelled run is ended
_REAP_S: Final = 5.0
_CPU_SHARE: Final = 0.5  # of its limit: the kernel limits CPU time by ticks, which may be far more than it reports
_FILES: Final = 64  # open ones of each process: the buffers of sockets are memory that RLIMIT_AS does not count
_ENVIRONMENT: Final = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
_MARKER: Final = "SLIPSTREAM_SANDBOX"  # variable in the environment of an unconfined program's processes
_BOOTSTRAP: Final = Path(start.__file__).read_text(encoding="utf-8")
_thread = threading.local()


class SandboxUnavailable(SlipstreamError):
    """No program can run, or one was killed from outside. Never a score.

    bubblewrap is missing or forbidden, the interpreter did not start, or someone killed it, such as the kernel for lack
    of memory.
    """


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one program; those of the kernel hold for each of its processes.

    Attributes:
        cpu_s: CPU seconds, rounded up to whole ones.
        wall_s: seconds since the program has started.
        memory_bytes: address space.
        processes: processes and threads at a time.
        output_bytes: stdout and stderr together.
        file_bytes: all files in /tmp.
    """

    cpu_s: float = 5.0
    wall_s: float = 10.0
    memory_bytes: int = 512 << 20
    processes: int = 64
    output_bytes: int = 1 << 20
    file_bytes: int = 16 << 20


DEFAULT_LIMITS: Final = SandboxLimits()


@dataclass(frozen=True)
class Interpreter:
    """A Python that the sandbox can run.

    Attributes:
        path: the executable.
        folders: what it needs besides /usr, by its path in the sandbox.
        confined: false where bubblewrap can't run and that is allowed.
        modules: marshalled code of the modules that run inside, by name.
    """

    path: str
    folders: tuple[tuple[str, str], ...]
    confined: bool
    modules: tuple[tuple[str, bytes], ...] = ()


@dataclass
class Process:
    """A process and its outputs so far.

    Attributes:
        status: what it has written to the status pipe.
        exit_code: 128 + signal number for one that a signal ended; None while it runs.
        cpu_s: CPU seconds until its end, those of its children included.
    """

    popen: "subprocess.Popen[bytes]"
    status_file: int
    confined: bool
    limits: SandboxLimits
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    status: bytearray = field(default_factory=bytearray)
    exit_code: int | None = None
    cpu_s: float = 0.0

    def reap(self) -> None:
        """Notes the end of the process if it has ended. Raises: SandboxUnavailable if bubblewrap itself was killed."""
        if self.exit_code is not None:
            return
        with suppress(ChildProcessError):
            process, status, usage = os.wait4(self.popen.pid, os.WNOHANG)
            if process == 0:
                return
            code = self.popen.returncode = os.waitstatus_to_exitcode(status)
            self.exit_code = code if code >= 0 else 128 - code
            self.cpu_s = usage.ru_utime + usage.ru_stime
            if code < 0 and self.confined:
                # No program can do that: bubblewrap is outside of its process namespace.
                raise SandboxUnavailable(f"bubblewrap was ended by signal {-code}")

    def ended(self) -> Ended:
        """The limit that ended the process, or `exit` if it has ended by itself. Raises: SandboxUnavailable."""
        assert self.exit_code is not None, "the process runs"
        if self.exit_code == 128 + signal.SIGKILL:
            if self.cpu_s >= _CPU_SHARE * _whole_cpu_s(self.limits):
                return "cpu"
            if self.confined:
                raise SandboxUnavailable("the program was killed from outside by signal 9")
        if self.exit_code in (128 + signal.SIGKILL, 128 + signal.SIGSYS):
            return "killed"
        return _cause(self.stderr.decode(errors="replace")) if self.exit_code == 1 else "exit"

    def check_started(self) -> None:
        """Raises: SandboxUnavailable if the process has not reached its program."""
        if not self.status.startswith(STARTED):
            written = self.stderr.decode(errors="replace").strip()[-500:]
            code = "" if self.exit_code is None else f": exit code {self.exit_code}"
            raise SandboxUnavailable(written or f"the interpreter did not start within {START_S:g} s{code}")


class Outputs:
    """Reads what processes write, and notes their ends."""

    def __init__(self, *processes: Process, cancelled: threading.Event) -> None:
        self._processes, self._cancelled = processes, cancelled
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> "Outputs":
        with ExitStack() as stack:
            stack.callback(self._selector.close)
            for process in self._processes:
                assert process.popen.stdout is not None and process.popen.stderr is not None
                self._register(process.popen.stdout.fileno(), process, process.stdout)
                self._register(process.popen.stderr.fileno(), process, process.stderr)
                self._register(process.status_file, process, process.status)
                ended = os.pidfd_open(process.popen.pid)
                stack.callback(os.close, ended)
                self._register(ended, process, None)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read_until(self, done: Callable[[], bool], *, within_s: float) -> Ended | None:
        """Reads until something is the case; returns the limit that was hit before. Raises: SandboxUnavailable."""
        deadline = time.monotonic() + within_s
        while not done():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._cancelled.is_set():
                return "wall"
            for ready, _ in self._selector.select(min(left_s, _POLL_S)):
                if not self._read(ready.fd, *ready.data):
                    return "output"
        return None

    def has_ended(self, process: Process) -> bool:
        """True if the process has ended and all that it wrote is read."""
        return not any(key.data[0] is process for key in self._selector.get_map().values())

    def _register(self, file: int, process: Process, output: bytearray | None) -> None:
        self._selector.register(file, selectors.EVENT_READ, (process, output))

    def _read(self, file: int, process: Process, output: bytearray | None) -> bool:
        """False if a process writes more than it may."""
        if output is None:
            self._selector.unregister(file)
            process.reap()
            return True
        piece = os.read(file, 1 << 16)
        if not piece:
            self._selector.unregister(file)
        room = process.limits.output_bytes - len(process.stdout) - len(process.stderr) - len(process.status)
        output.extend(piece[: max(0, room)])
        return len(piece) <= room


@contextmanager
def started(
    interpreter: Interpreter,
    role: Literal["program", "peer"],
    content: Callable[[int], bytes],
    limits: SandboxLimits,
    *,
    stdin: str = "",
    files: Sequence[int] = (),
    user: int | None,
) -> Iterator[Process]:
    """A process; kills it at the end.

    Args:
        content: what `inside/start.py` runs, given the number of the status file.
        files: open files that the process inherits.
        user: its user id, under root.

    Raises: SandboxUnavailable.
    """
    marker = secrets.token_hex(8)
    with ExitStack() as stack:
        folder = "/"
        if not interpreter.confined:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-"))
            if user is not None:
                os.chown(folder, user, user)
        status, status_end = os.pipe()
        stack.callback(os.close, status)
        with ExitStack() as inherited:
            inherited.callback(os.close, status_end)
            content_file, stdin_file, filter_file = (
                _file(data, inherited)
                for data in (content(status_end), stdin.encode(errors="replace"), syscall_filter() or b"")
            )
            # Before bubblewrap's filter, which denies this limit.
            command = ["/bin/sh", "-c", 'ulimit -t "$0" && exec "$@"', str(_whole_cpu_s(limits))]
            command += _bubblewrap(interpreter, limits, filter_file) if interpreter.confined else []
            command += [interpreter.path, "-I", "-c", _BOOTSTRAP, role, str(status_end), str(content_file)]
            command += _limits(limits, counts_processes=interpreter.confined or user is not None)
            try:
                popen = subprocess.Popen(
                    command,
                    stdin=stdin_file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(status_end, content_file, filter_file, *files),
                    cwd=folder,
                    env=_ENVIRONMENT | {_MARKER: marker},
                    user=user,
                    group=user,
                    extra_groups=None if user is None else [],
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxUnavailable(str(error)) from error
        stack.enter_context(popen)
        stack.callback(_kill, popen, f"{_MARKER}={marker}".encode(), confined=interpreter.confined)
        yield Process(popen, status, interpreter.confined, limits)


def own_users() -> tuple[int, int] | tuple[None, None]:
    """Two user ids of this thread's programs, which no other thread or process on this machine uses; None: not root."""
    if os.geteuid() != 0:
        return None, None
    if not hasattr(_thread, "slot"):
        _thread.slot, _thread.user = _reserve_users()
    user: int = _thread.user
    return user, user + 1


@contextmanager
def own_user() -> Iterator[int | None]:
    """A user id that nobody else on this machine uses in the meantime; None: not root."""
    if os.geteuid() != 0:
        yield None
        return
    slot, user = _reserve_users()
    with slot:
        yield user


def _reserve_users() -> tuple[socket.socket, int]:
    """A socket that reserves two user ids until it is closed, and the first of them."""
    number = 0
    while True:
        # An abstract address is freed by the kernel when its process ends.
        slot = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            slot.bind(f"\0slipstream-sandbox-{number}")
        except OSError:
            slot.close()
            number += 1
        else:
            return slot, FIRST_USER + 2 * number


def _kill(process: "subprocess.Popen[bytes]", marker: bytes, *, confined: bool) -> None:
    """Ends a process, and before it its children.

    The first process of a namespace would become an orphan, and the init of many containers does not reap those.
    """
    was_killed = process.poll() == -signal.SIGKILL
    if process.returncode is None:
        with suppress(OSError, subprocess.TimeoutExpired):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            if children:
                process.wait(_REAP_S)
    process.kill()
    process.wait()
    # If bubblewrap was killed from outside while it started, its child waits for it for ever.
    if was_killed or not confined:
        kill_members([process.pid], marker, deadline_s=_REAP_S)


def _bubblewrap(interpreter: Interpreter, limits: SandboxLimits, filter_file: int) -> list[str]:
    """The command in front of a program's. Raises: SandboxUnavailable."""
    bwrap = shutil.which("bwrap")  # found here: Popen searches the PATH of the child's environment
    if bwrap is None:
        raise SandboxUnavailable("bwrap is not on the PATH")
    if syscall_filter() is None:
        raise SandboxUnavailable(f"no filter of system calls for {platform.machine()}: x86_64 and aarch64 have one")
    command = [bwrap, "--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session"]
    command += ["--seccomp", str(filter_file), *system_folders(), "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--size", str(limits.file_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    for inside, folder in interpreter.folders:  # which may be in /tmp
        command += ["--ro-bind", folder, inside]
    # The root is a file system in memory without a limit.
    return [*command, "--remount-ro", "/", "--"]


def system_folders() -> list[str]:
    """Arguments of bubblewrap that show this machine's programs and libraries, read-only."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64"):  # links into /usr, but on older systems folders
        path = Path("/", name)
        arguments += (
            ["--symlink", f"usr/{name}", str(path)] if path.is_symlink() else ["--ro-bind-try", *[str(path)] * 2]
        )
    return [*arguments, "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]


def _limits(limits: SandboxLimits, *, counts_processes: bool) -> list[str]:
    """Arguments of `inside/start.py`."""
    values = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": _FILES,
    }
    if counts_processes:  # else it would count all that this user runs on the machine
        values["RLIMIT_NPROC"] = limits.processes
    return [f"{name}:{value}" for name, value in values.items()]


def _whole_cpu_s(limits: SandboxLimits) -> int:
    return max(1, math.ceil(limits.cpu_s))


def _cause(stderr: str) -> Ended:
    """The limit that an uncaught exception names."""
    causes: dict[str, Ended] = {
        "MemoryError": "memory",
        "BlockingIOError: [Errno 11]": "processes",
        "RuntimeError: can't start new thread": "processes",
        "OSError: [Errno 27]": "files",
        "OSError: [Errno 28]": "files",
    }
    lines = stderr[-2000:].splitlines()  # several processes may write at once
    return next((cause for text, cause in causes.items() if any(line.startswith(text) for line in lines)), "exit")


def _file(content: bytes, stack: ExitStack) -> int:
    """A file in memory at its start, which nobody can change. Raises: OSError."""
    number = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, number)
    with open(number, "wb", closefd=False) as file:
        file.write(content)
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(number, 0, os.SEEK_SET)
    return number
