"""Runs programs and their checks in threads, for coroutines."""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from slipstream.sandbox.checks import Check, Outcome, evaluate
from slipstream.sandbox.interpreter import find_interpreter
from slipstream.sandbox.process import DEFAULT_LIMITS, SandboxLimits
from slipstream.sandbox.program import SandboxResult, run_program

Result = TypeVar("Result")
_THREADS: Final = ThreadPoolExecutor(max(4, 2 * len(os.sched_getaffinity(0))), thread_name_prefix="sandbox")
"""Each runs one program. They live as long as this process: a program ends with the thread that started it."""


async def run_python(
    code: str,
    *,
    stdin: str = "",
    limits: SandboxLimits = DEFAULT_LIMITS,
    python: str | None = None,
    allow_unconfined: bool = False,
) -> SandboxResult:
    """Runs a program; a cancelled one is killed.

    Args:
        python, allow_unconfined: see `find_interpreter`.

    Raises: SandboxUnavailable.
    """

    def run(cancelled: threading.Event) -> SandboxResult:
        interpreter = find_interpreter(python, allow_unconfined=allow_unconfined)
        return run_program(interpreter, code, stdin, limits, cancelled)

    return await _in_thread(run)


async def run_checks(
    program: str,
    checks: Sequence[Check],
    *,
    imports: str = "",
    limits: SandboxLimits = DEFAULT_LIMITS,
    python: str | None = None,
    allow_unconfined: bool = False,
) -> list[Outcome]:
    """Runs a program, and evaluates checks of it in another process; both are killed when this is cancelled.

    Args:
        imports: import statements for the checks.
        limits: of each process; `wall_s` of each check, of the first one including the program's own run.
        python, allow_unconfined: see `find_interpreter`.

    Raises: SandboxUnavailable.
    """

    def run(cancelled: threading.Event) -> list[Outcome]:
        interpreter = find_interpreter(python, allow_unconfined=allow_unconfined)
        return evaluate(interpreter, program, imports, checks, limits, cancelled)

    return await _in_thread(run)


async def _in_thread(run: Callable[[threading.Event], Result]) -> Result:
    cancelled = threading.Event()
    try:
        return await asyncio.get_running_loop().run_in_executor(_THREADS, run, cancelled)
    except asyncio.CancelledError:
        cancelled.set()
        raise
