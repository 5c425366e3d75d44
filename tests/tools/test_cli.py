"""The command `slipstream` as a shell sees it: what it prints, and how it ends."""

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import IO

import pytest

from slipstream import configs
from slipstream.tools import cli

GOLDEN = Path(__file__).parents[1] / "golden" / "algorithms.json"
DEADLINE_S = 120.0


def conform(stdout: IO[str] | int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slipstream.tools.cli", "conform", str(GOLDEN)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_ends_it_without_a_word_as_sigpipe_would(
    monkeypatch: pytest.MonkeyPatch, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = conform(writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_full_disk_is_told_in_a_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = conform(full)
    assert (done.returncode, done.stderr) == (1, "error: stdout can't be written to: No space left on device\n")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"slipstream {version('slipstream')}\n"


def test_ctrl_c_afterwards_is_what_the_command_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    monkeypatch.setattr(cli, "dispatch", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main([])
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 128 + signal.SIGINT


def test_a_working_directory_that_was_deleted_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    line = 'cd "$1" && rmdir "$1" && exec "$2" -m slipstream.tools.cli ledger show'
    done = subprocess.run(
        ["sh", "-c", line, "sh", str(tmp_path / "gone"), sys.executable],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stderr) == (2, "error: the working directory was deleted; change to another one\n")


@pytest.mark.parametrize("words", [["summary"], ["ledger", "verify"], ["ledger", "export", "--out"], ["up"]])
def test_a_path_that_can_not_even_be_looked_at_is_told_in_a_line(words: list[str], tmp_path: Path) -> None:
    """As one in another user's folder; which would stop no test that runs as root."""
    path = tmp_path / (300 * "a")
    if words == ["up"]:
        arguments = [str(Path(configs.__file__).parent / "demo.yaml"), f"run.dir={path}"]
    else:
        arguments = [str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.tools.cli", *words, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {path}")
    assert done.stderr.endswith(" can't be used: File name too long\n")
    assert done.stderr.count("\n") == 1
