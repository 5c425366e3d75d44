"""What is printed, whoever reads it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream import configs

DEADLINE_S = 60.0
DEMO = Path(configs.__file__).parent / "demo.yaml"


@pytest.mark.parametrize("module", ["slipstream.buffer.cli", "slipstream.tools.cli"])
def test_a_configuration_that_finds_no_room_is_told_in_a_line(module: str) -> None:
    words = ["up"] if module == "slipstream.tools.cli" else []
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", module, *words, DEMO, "--print-config"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
    assert (done.returncode, done.stderr) == (1, "error: stdout can't be written to: No space left on device\n")


def test_a_table_that_nobody_reads_ends_it_likewise() -> None:
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


def test_a_terminal_without_unicode_shows_question_marks() -> None:
    code = (
        "from slipstream.configs.runtime.files import run_with_stdout\n"
        "run_with_stdout(lambda: print('0.036 \\u2192 0.999') or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.036 ? 0.999\n", "")
