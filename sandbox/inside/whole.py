"""Judge and program for a server that runs one program: the judge is that program, and starts the other one.

It reads the checks and a token from stdin, which the other process can't. It prints token and outcome as its last line.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

from slipstream.sandbox.inside.judge import Judge, judge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_PR_SET_DUMPABLE: Final = 4
_NOBODY: Final = 65534


def main(loader: str) -> None:
    """Runs one check.

    Args:
        loader: source that runs the function `main` of `inside/answer.py` with the socket's number, its argument.
    """
    import ast

    token, task = ast.literal_eval(sys.stdin.read())
    _hide_memory()
    ours, theirs = socket.socketpair()
    try:
        program = _start(loader, theirs, _NOBODY if os.geteuid() == 0 else None)
    except OSError:  # another user may not run this interpreter
        program = _start(loader, theirs, None)
    theirs.close()
    outcomes: list[str] = []
    judge(Judge(ours.fileno()), task, outcomes.append)
    program.kill()
    sys.stdout.write(f"\n{token} {outcomes[-1]}\n")
    sys.stdout.flush()
    os._exit(0)


def _start(loader: str, end: socket.socket, user: int | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-c", loader, str(end.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[end.fileno()],
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )


def _hide_memory() -> None:
    """Denies this process's memory and open files to other processes of the same user, except root's."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
