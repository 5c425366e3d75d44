"""Judge and program for a server that runs one program: the judge is that program, and starts the other one.

It reads the checks and a token from stdin, which the other process can't. It prints token and outcome as its last line.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

from slipstream.configs.runtime.sandbox.inside.judge import Judge, judge

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
    with theirs, subprocess.Popen(
        [sys.executable, "-I", "-c", loader, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env={},
        preexec_fn=_leave_root,  # this process has one thread
    ) as program:
        theirs.close()
        outcomes: list[str] = []
        judge(Judge(ours.fileno()), task, outcomes.append)
        program.kill()
    print(f"\n{token} {outcomes[-1]}", flush=True)
    os._exit(0)


def _hide_memory() -> None:
    """Denies this process's memory and open files to other processes of the same user, except root's."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _leave_root() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
