"""Runs Python programs of unknown origin: bubblewrap, resource limits, and a user without rights.

A program sees the interpreter's folders read-only and an empty /tmp of its own. It has no network and no other process
but its own. Started by root it runs as a user of its own, because RLIMIT_NPROC does not bind root and counts all
processes of a user. Needs bubblewrap 0.8 and user namespaces.
"""

import asyncio
import math
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.processes import kill_members

Ended = Literal["exit", "cpu", "memory", "processes", "files", "output", "wall", "killed"]

FIRST_USER: Final = 200_000
"""User id of the first program that runs at a time under root, a range that distributions leave free."""
_STARTED: Final = b"started\n"
_POLL_S: Final = 0.1  # until a cancelled run is ended
_REAP_S: Final = 5.0
_ENVIRONMENT: Final = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
_MARKER: Final = "SLIPSTREAM_SANDBOX"  # variable in the environment of an unconfined program's processes
_THREADS: Final = ThreadPoolExecutor(max(4, 2 * len(os.sched_getaffinity(0))), thread_name_prefix="sandbox")
"""Each runs one program. They live as long as this process: a program ends with the thread that started it."""
_thread = threading.local()

_BOOTSTRAP: Final = """
def main():
    import os, resource, sys
    status, program = int(sys.argv[1]), int(sys.argv[2])
    with open(program, "rb") as file:
        token, source = file.read().split(b"\\n", 1)
    with open("main.py", "wb") as file:  # tracebacks show its lines
        file.write(source)
    for limit in sys.argv[3:]:
        name, soft, hard = limit.split(":")
        resource.setrlimit(getattr(resource, name), (int(soft), int(hard)))
    sys.argv[:] = ["main.py"]
    scope = sys.modules["__main__"].__dict__
    del scope["main"]
    scope["__file__"] = "main.py"
    os.write(status, b"started\\n")
    exec(compile(source, "main.py", "exec", dont_inherit=True), scope)
    sys.stdout.flush()
    os.write(status, token)
main()
"""
"""Arguments: file numbers of status and program, limits. The token is in no file that the program can read."""


class SandboxUnavailable(SlipstreamError):
    """No program can run: bubblewrap is missing or forbidden, or the interpreter did not start. Never a score."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one program; those of the kernel hold for each of its processes.

    Attributes:
        cpu_s: CPU seconds, rounded up to whole ones.
        wall_s: seconds from its start, the sandbox's own included.
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


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """The end of a program.

    Attributes:
        exit_code: 128 + signal number for a program that a signal ended.
        stdout, stderr: at most `output_bytes` together; invalid UTF-8 is replaced.
        ended: the limit that it hit, or `exit` if it ended by itself. By the error that it printed for `memory`,
            `processes` and `files`: a hint for people.
        finished: true if it ran to its last line: neither an exception nor an exit before it.
    """

    exit_code: int
    stdout: str
    stderr: str
    ended: Ended
    finished: bool


@dataclass(frozen=True)
class Interpreter:
    """A Python that the sandbox can run.

    Attributes:
        path: the executable.
        folders: what it needs, besides /usr.
        confined: false where bubblewrap can't run and that is allowed.
    """

    path: str
    folders: tuple[str, ...]
    confined: bool


async def run_python(
    code: str,
    *,
    stdin: str = "",
    limits: SandboxLimits = SandboxLimits(),
    python: str | None = None,
    allow_unconfined: bool = False,
) -> SandboxResult:
    """Runs a program in a thread; a cancelled one is killed.

    Args:
        python: an interpreter, for the packages that it has; unset: this one, or the system's where the sandbox's user
            can't read this one.
        allow_unconfined: where bubblewrap can't run, run with limits only: with network and files.

    Raises: SandboxUnavailable.
    """
    cancelled = threading.Event()

    def run() -> SandboxResult:
        return _run(find_interpreter(python, allow_unconfined=allow_unconfined), code, stdin, limits, cancelled)

    try:
        return await asyncio.get_running_loop().run_in_executor(_THREADS, run)
    except asyncio.CancelledError:
        cancelled.set()
        raise


@lru_cache
def find_interpreter(python: str | None = None, *, allow_unconfined: bool = False) -> Interpreter:
    """The first interpreter that runs a trial program in the sandbox. Call it at start: it raises before any answer.

    Raises: SandboxUnavailable.
    """
    executables = [python] if python is not None else [sys._base_executable, "/usr/bin/python3"]  # type: ignore[attr-defined]
    errors: list[str] = []
    for confined in [True, False] if allow_unconfined else [True]:
        for executable in executables:
            try:
                found = Interpreter(executable, _folders(executable), confined)
                _run(found, "", "", SandboxLimits(), threading.Event())
            except SandboxUnavailable as error:
                errors.append(f"{executable}: {error}")
            else:
                return found
    raise SandboxUnavailable(
        f"no program can run in the sandbox ({'; '.join(errors)}). Install bubblewrap 0.8 or later, and allow user "
        "namespaces to this container; or set allow_unconfined, if these programs may use the network and read files"
    )


def _folders(executable: str) -> tuple[str, ...]:
    """The folders of an interpreter and of its virtual environment, outside /usr. Raises: SandboxUnavailable."""
    command = [executable, "-I", "-S", "-c", "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(str(error)) from None
    # -S: site adds a virtual environment's prefix, which is then the executable's folder
    folders = {*found, str(Path(executable).parent.parent)} if Path(executable).parent.name == "bin" else {*found}
    return tuple(sorted(folder for folder in folders if not Path(folder).is_relative_to("/usr")))


@dataclass
class _Outputs:
    """Output of a program so far, by pipe."""

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    status: bytearray = field(default_factory=bytearray)


def _run(
    interpreter: Interpreter, code: str, stdin: str, limits: SandboxLimits, cancelled: threading.Event
) -> SandboxResult:
    """Runs a program and waits for its end, in the calling thread. Raises: SandboxUnavailable."""
    outputs, token = _Outputs(), secrets.token_bytes(16).hex().encode()
    until = time.monotonic() + limits.wall_s
    with _started(interpreter, token + b"\n" + code.encode(errors="replace"), stdin, limits) as (process, status):
        hit = _read(process, status, outputs, limits, until, cancelled)
        if hit is None:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:  # it has closed its outputs and runs on
                hit = "wall"
    written = outputs.stderr.decode(errors="replace")
    if hit is None and interpreter.confined and process.returncode < 0:
        # No program can do that: bubblewrap is outside of its process namespace, and reports its signals as exit codes.
        raise SandboxUnavailable(f"bubblewrap was ended by signal {-process.returncode}")
    if not outputs.status.startswith(_STARTED):
        reason = written.strip()[-500:] or f"no start within {limits.wall_s:g} s"
        raise SandboxUnavailable(reason)
    exit_code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return SandboxResult(
        exit_code=exit_code,
        stdout=outputs.stdout.decode(errors="replace"),
        stderr=written,
        ended=hit or _cause(exit_code, written),
        finished=hit is None and exit_code == 0 and outputs.status == _STARTED + token,
    )


@contextmanager
def _started(
    interpreter: Interpreter, program: bytes, stdin: str, limits: SandboxLimits
) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """The process of a program and the reading end of its status pipe; kills it at the end.

    Raises: SandboxUnavailable.
    """
    user, marker = _own_user(), secrets.token_hex(8)
    with ExitStack() as stack:
        folder = "/"
        if not interpreter.confined:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-"))
            if user is not None:
                os.chown(folder, user, user)
        wrapper = _bubblewrap(interpreter, limits) if interpreter.confined else []
        status, status_end = os.pipe()
        stack.callback(os.close, status)
        program_file, stdin_file = _file(program), _file(stdin.encode(errors="replace"))
        command = [interpreter.path, "-I", "-c", _BOOTSTRAP, str(status_end), str(program_file)]
        command += _limits(limits, counts_processes=interpreter.confined or user is not None)
        try:
            process = subprocess.Popen(
                [*wrapper, *command],
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(status_end, program_file),
                cwd=folder,
                env=_ENVIRONMENT | {_MARKER: marker},
                user=user,
                group=user,
                extra_groups=None if user is None else [],
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxUnavailable(str(error)) from error
        finally:
            for number in (status_end, program_file, stdin_file):
                os.close(number)
        stack.enter_context(process)
        if not interpreter.confined:
            stack.callback(kill_members, [process.pid], f"{_MARKER}={marker}".encode(), deadline_s=_REAP_S)
        stack.callback(_kill, process)
        yield process, status


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process, and before it its children.

    The first process of a namespace would become an orphan, and the init of many containers does not reap those.
    """
    if process.poll() is None:
        with suppress(OSError, subprocess.TimeoutExpired):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            if children:
                process.wait(_REAP_S)
    process.kill()
    process.wait()


def _read(
    process: "subprocess.Popen[bytes]",
    status: int,
    outputs: _Outputs,
    limits: SandboxLimits,
    until: float,
    cancelled: threading.Event,
) -> Ended | None:
    """Reads until all pipes are closed; returns the limit that was hit before."""
    assert process.stdout is not None and process.stderr is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, outputs.stdout)
        selector.register(process.stderr, selectors.EVENT_READ, outputs.stderr)
        selector.register(status, selectors.EVENT_READ, outputs.status)
        while selector.get_map():
            left_s = until - time.monotonic()
            if left_s <= 0 or cancelled.is_set():
                return "wall"
            for ready, _ in selector.select(min(left_s, _POLL_S)):
                room = limits.output_bytes - len(outputs.stdout) - len(outputs.stderr)
                piece = os.read(ready.fd, 1 << 16)
                if not piece:
                    selector.unregister(ready.fileobj)
                elif len(piece) > room:
                    ready.data.extend(piece[:room])
                    return "output"
                else:
                    ready.data.extend(piece)
    return None


def _bubblewrap(interpreter: Interpreter, limits: SandboxLimits) -> list[str]:
    """The command in front of a program's. Raises: SandboxUnavailable."""
    bwrap = shutil.which("bwrap")  # found here: Popen searches the PATH of the child's environment
    if bwrap is None:
        raise SandboxUnavailable("bwrap is not on the PATH")
    command = [bwrap, "--unshare-all", "--die-with-parent", "--new-session"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):  # links into /usr, but on older systems folders
        path = Path("/", name)
        command += ["--symlink", f"usr/{name}", str(path)] if path.is_symlink() else ["--ro-bind-try", *[str(path)] * 2]
    for folder in interpreter.folders:
        command += ["--ro-bind", folder, folder]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--size", str(limits.file_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    # The root is a file system in memory without a limit.
    return [*command, "--remount-ro", "/", "--"]


def _limits(limits: SandboxLimits, *, counts_processes: bool) -> list[str]:
    """Arguments of the bootstrap."""
    cpu_s = max(1, math.ceil(limits.cpu_s))
    pairs = {
        "RLIMIT_CPU": (cpu_s, cpu_s + 1),  # soft: a signal that names the reason; hard: what ignores it
        "RLIMIT_AS": (limits.memory_bytes,) * 2,
        "RLIMIT_FSIZE": (limits.file_bytes,) * 2,
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_NOFILE": (256, 256),
    }
    if counts_processes:  # else it would count all that this user runs on the machine
        pairs["RLIMIT_NPROC"] = (limits.processes,) * 2
    return [f"{name}:{soft}:{hard}" for name, (soft, hard) in pairs.items()]


def _cause(exit_code: int, stderr: str) -> Ended:
    if exit_code == 128 + signal.SIGXCPU:
        return "cpu"
    if exit_code == 128 + signal.SIGKILL:
        return "killed"
    if exit_code != 1:
        return "exit"
    causes: dict[str, Ended] = {
        "MemoryError": "memory",
        "BlockingIOError: [Errno 11]": "processes",
        "RuntimeError: can't start new thread": "processes",
        "OSError: [Errno 27]": "files",
        "OSError: [Errno 28]": "files",
    }
    lines = stderr[-2000:].splitlines()  # several processes may write at once
    return next((cause for text, cause in causes.items() if any(line.startswith(text) for line in lines)), "exit")


def _own_user() -> int | None:
    """The user id of this thread's programs, which no other thread or process on this machine uses; None: not root."""
    if os.geteuid() != 0:
        return None
    number = 0
    while not hasattr(_thread, "slot"):
        # An abstract address is freed by the kernel when its process ends.
        slot = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            slot.bind(f"\0slipstream-sandbox-{number}")
            _thread.slot, _thread.user = slot, FIRST_USER + number
        except OSError:
            slot.close()
            number += 1
    user: int = _thread.user
    return user


def _file(content: bytes) -> int:
    """A file in memory, open for reading at its start. Raises: OSError."""
    number = os.memfd_create("sandbox")
    with open(number, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(number, 0, os.SEEK_SET)
    return number
