"""The Python that runs programs, and the folders that it needs."""

import os
import pwd
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from slipstream.sandbox.inside import answer, judge, remote, wire
from slipstream.sandbox.process import Interpreter, SandboxLimits, SandboxUnavailable
from slipstream.sandbox.program import run_program

SOURCES: Final = tuple(
    (module.__name__, Path(str(module.__file__)).read_text(encoding="utf-8"))
    for module in (wire, remote, judge, answer)
)
"""Names and sources of the modules that run inside, in the order in which they import each other."""

_TRIAL: Final = f"""
import marshal
for name, source in {SOURCES!r}:
    print(marshal.dumps(compile(source, name, "exec", dont_inherit=True)).hex())
"""
_QUESTION: Final = """
import sys
print(sys.executable, sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, sep="\\n")
"""
_FIRST_PERSON: Final = 1000  # lower user ids belong to the system, but for root


@lru_cache
def find_interpreter(python: str | None = None, *, allow_unconfined: bool = False) -> Interpreter:
    """The first interpreter that runs a trial program in the sandbox. Call it at start: it raises before any answer.

    Args:
        python: an interpreter, for the packages that it has; unset: this one, or the system's where the sandbox's user
            can't read this one.
        allow_unconfined: where bubblewrap can't run, run with limits only: with network and files.

    Raises: SandboxUnavailable.
    """
    executables = [python] if python is not None else [sys._base_executable, "/usr/bin/python3"]  # type: ignore[attr-defined]
    errors: list[str] = []
    for confined in [True, False] if allow_unconfined else [True]:
        for executable in executables:
            try:
                return _tried(_described(executable, confined=confined))
            except SandboxUnavailable as error:
                errors.append(f"{executable}: {error}")
    raise SandboxUnavailable(
        f"no program can run in the sandbox ({'; '.join(errors)}). Install bubblewrap 0.8 or later, and allow user "
        "namespaces to this container; or set allow_unconfined, if these programs may use the network and read files"
    )


def _tried(interpreter: Interpreter) -> Interpreter:
    """The interpreter with the code of the modules, which it compiles. Raises: SandboxUnavailable."""
    result = run_program(interpreter, _TRIAL, "", SandboxLimits(cpu_s=60, wall_s=60), threading.Event())
    if result.exit_code != 0:
        raise SandboxUnavailable(result.stderr.strip()[-500:])
    codes = map(bytes.fromhex, result.stdout.split())
    return replace(interpreter, modules=tuple(zip((name for name, _ in SOURCES), codes, strict=True)))


def _described(executable: str, *, confined: bool) -> Interpreter:
    """Path and folders of an interpreter. Raises: SandboxUnavailable."""
    try:
        done = subprocess.run(
            [executable, "-I", "-c", _QUESTION], capture_output=True, text=True, timeout=60, check=True
        )
        path, *prefixes = done.stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(str(error)) from None
    folders = {prefix: os.path.realpath(prefix) for prefix in prefixes}
    for folder in folders.values():
        _check_no_home(folder)
    if not any(Path(path).is_relative_to(prefix) for prefix in prefixes):
        path = os.path.realpath(path)  # a link elsewhere, which the sandbox does not show
    outside_usr = {(inside, folder) for inside, folder in folders.items() if not Path(folder).is_relative_to("/usr")}
    return Interpreter(path, tuple(sorted(outside_usr)), confined)


def _check_no_home(folder: str) -> None:
    """Raises: SandboxUnavailable for a folder that holds home folders, or is one: keys lie there."""
    for home in _homes():
        if home.is_relative_to(folder):
            raise SandboxUnavailable(
                f"its folder {folder} holds the home folder {home}, which programs would read; create a virtual "
                f"environment in a folder of its own (python -m venv {home}/.venv) and name its bin/python"
            )


def _homes() -> Iterator[Path]:
    yield Path.home().resolve()
    for entry in pwd.getpwall():
        if entry.pw_uid == 0 or entry.pw_uid >= _FIRST_PERSON:
            yield Path(entry.pw_dir).resolve()
