"""The command `slipstream`: its commands, its output, and how it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from slipstream.tools import cli
from tests.tools.run_command import DEADLINE_S, DEMO, command, slipstream

GROUPS = {"slipstream": cli.COMMANDS, "slipstream ledger": cli.LEDGER_COMMANDS}


@pytest.mark.parametrize("prog", GROUPS)
def test_help_names_each_command_which_has_its_own_help(prog: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, *group = prog.split()
    with pytest.raises(SystemExit, match="0"):
        cli.main([*group, "--help"])
    overview = capsys.readouterr().out
    for name, (_, purpose) in GROUPS[prog].items():
        assert f"  {name} " in overview
        assert purpose in overview
        with pytest.raises(SystemExit, match="0"):
            cli.main([*group, name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: {prog} {name} ")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["ledger", "burn"], "'burn'"),
        (["sumary"], "'summary'"),
        *(([word], cli.ELSEWHERE[word]) for word in ("sft", "dpo", "monitor", "serve", "status", "resume", "export")),
        (["bench"], cli.ELSEWHERE["bench"]),
    ],
)
def test_unknown_command_is_answered_with_what_there_is(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_pipe_ends_it_silently_as_sigpipe_would(monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        config = Popen(command("config", "--key", "run.seed"), stdout=stdout, stderr=PIPE, text=True)
        _, errors = config.communicate(timeout=DEADLINE_S)
    assert (config.returncode, errors) == (128 + signal.SIGPIPE, "")


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"slipstream {version('slipstream')}\n"


def test_checkout_that_is_not_installed_has_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert "not installed" in capsys.readouterr().out


def test_ctrl_c_in_a_command_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_deleted_working_directory_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    line = 'cd "$1" && rmdir "$1" && exec "$2" -m slipstream.tools.cli ledger show'
    done = subprocess.run(
        ["sh", "-c", line, "sh", str(tmp_path / "gone"), sys.executable],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the working directory")


@pytest.mark.parametrize("words", [["summary"], ["ledger", "export", "--out"], ["up"]])
def test_unusable_path_is_reported_in_one_line(words: Sequence[str], tmp_path: Path) -> None:
    path = tmp_path / (300 * "a")  # fails for root too, unlike one in another user's folder
    done = slipstream(*words, *([DEMO, f"run.dir={path}"] if words == ["up"] else [path]), folder=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {path}")
    assert line.endswith("File name too long")


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["up", "absent.yaml"]])
def test_help_and_bad_configs_load_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    code = """
import sys
from slipstream.tools.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    print({"torch", "vllm", "transformers", "matplotlib", "numpy", "redis", "zmq"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("set()\n")
