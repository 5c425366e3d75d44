"""Runs a program in the sandbox: its outputs, and the limit that ended it."""

import threading
from dataclasses import dataclass

from slipstream.sandbox.process import (
    START_S,
    Ended,
    Interpreter,
    Outputs,
    SandboxLimits,
    own_users,
    started,
)


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """The end of a program.

    Attributes:
        exit_code: 128 + signal number for a program that a signal ended. What it says is the program's word.
        stdout, stderr: at most `output_bytes` together; invalid UTF-8 is replaced.
        ended: the limit that it hit, or `exit` if it ended by itself. By the error that it printed for `memory`,
            `processes` and `files`: a hint for people.
    """

    exit_code: int
    stdout: str
    stderr: str
    ended: Ended


def run_program(
    interpreter: Interpreter, code: str, stdin: str, limits: SandboxLimits, cancelled: threading.Event
) -> SandboxResult:
    """Runs a program and waits for its end, in the calling thread. Raises: SandboxUnavailable."""
    source, (user, _) = code.encode(errors="replace"), own_users()
    with (
        started(interpreter, "program", lambda _: source, limits, stdin=stdin, user=user) as process,
        Outputs(process, cancelled=cancelled) as outputs,
    ):
        hit = outputs.read_until(lambda: bool(process.status) or outputs.has_ended(process), within_s=START_S)
        process.check_started()
        hit = hit or outputs.read_until(lambda: outputs.has_ended(process), within_s=limits.wall_s)
        return SandboxResult(
            exit_code=process.exit_code if process.exit_code is not None else 137,
            stdout=process.stdout.decode(errors="replace"),
            stderr=process.stderr.decode(errors="replace"),
            ended=hit or process.ended(),
        )
