"""Atomic writes, file modes, and exit codes of commands whose stdout fails."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.configs.runtime.files import apply_default_mode, write_atomically
from tests.configs.conftest import DEMO
from tests.full_disk import files_of_at_most

DEADLINE_S = 60.0


def test_failed_write_leaves_the_file_before_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert write_atomically(path, [b"old", memoryview(b"er")]) == 5
    with files_of_at_most(100), pytest.raises(OSError, match="too large"):
        write_atomically(path, [b"new", bytes(200)])
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


def test_file_gets_the_mode_of_a_new_one(tmp_path: Path) -> None:
    path, new = tmp_path / "private", tmp_path / "new"
    path.touch(0o600)
    new.touch()
    apply_default_mode(path)
    assert path.stat().st_mode == new.stat().st_mode


@pytest.mark.parametrize("command", [["slipstream.buffer.cli"], ["slipstream.tools.cli", "up"]], ids=" ".join)
def test_full_stdout_is_reported_in_one_line(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", *command, DEMO, "--print-config"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: stdout ")
    assert len(done.stderr.splitlines()) == 1


def test_closed_stdout_exits_as_sigpipe_does() -> None:
    """rich, which prints the tables, would exit with 1."""
    code = """
from rich.console import Console
from slipstream.configs.runtime.files import run_with_stdout
raise SystemExit(run_with_stdout(lambda: Console().print("x") or 0))
"""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=writer, check=False, timeout=DEADLINE_S)
    finally:
        os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE


def test_terminal_without_unicode_shows_question_marks() -> None:
    code = (
        "from slipstream.configs.runtime.files import run_with_stdout\n"
        "run_with_stdout(lambda: print('0.036 \\u2192 0.999') or 0)"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.036 ? 0.999\n", "")
