"""The command line that all processes share, and their logs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.configs.arguments import read_run_arguments, run_parser
from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import CERTAIN

CONFIG = "run: {name: small}\nmodel: {build: digits}\n"
DEADLINE_S = 110


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return path


def errors(capsys: pytest.CaptureFixture[str], *argv: object) -> list[str]:
    """Lines on stderr when the arguments are refused."""
    with pytest.raises(SystemExit, match="2"):
        read_run_arguments(run_parser("Test."), [str(argument) for argument in argv])
    return capsys.readouterr().err.splitlines()


def test_options_may_stand_between_overrides(config_file: Path) -> None:
    parser = run_parser("Test.")
    parser.add_argument("--fresh", action="store_true")
    arguments, config = read_run_arguments(parser, [str(config_file), "run.seed=3", "--fresh", "learner.steps=70"])
    assert arguments.fresh
    assert (config.run.name, config.run.seed, config.learner.steps) == ("small", 3, 70)


def test_printed_configuration_loads_as_an_equal_one(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        read_run_arguments(run_parser("Test."), [str(config_file), "learner.steps=70", "--print-config"])
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load_config(printed) == load_config(config_file, ["learner.steps=70"])


def test_each_mistake_has_a_line(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = errors(capsys, config_file, "learner.stps=7", "run.seed=x", "nonsense")
    assert len(lines) == 3
    assert all(line.startswith("error: ") for line in lines)
    (line,) = errors(capsys, tmp_path / "absent.yaml")
    assert str(tmp_path / "absent.yaml") in line
    assert errors(capsys)[-1].endswith(": CONFIG")


@pytest.mark.parametrize(
    ("package", "first"), [("buffer", "small/logs"), ("rollout_servers", "small/logs"), ("learner", "small")]
)
def test_unwritable_folder_is_named(config_file: Path, package: str, first: str) -> None:
    command = [sys.executable, "-m", f"slipstream.{package}.cli", str(config_file), f"run.dir={config_file}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: run.dir={config_file}: can't write {config_file}/{first}: ")
    assert len(done.stderr.splitlines()) == 1


CRASH = """
import sys, threading
from slipstream.configs.arguments import read_run_arguments, run_parser, start_log

def crash():
    raise RuntimeError("out of luck")

start_log(read_run_arguments(run_parser("Test."))[1].paths, "crashing", level="info")
thread = threading.Thread(target=crash)
thread.start()
thread.join()
crash()
"""


def test_crashes_of_process_and_thread_are_logged(config_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CRASH, str(config_file), f"run.dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 1
    records = [json.loads(line) for line in (tmp_path / "small" / "logs" / "crashing.jsonl").read_text().splitlines()]
    assert [(record["level"], record["error"]) for record in records] == [("critical", "out of luck")] * 2
    assert all("in crash" in record["exception"] for record in records)
    assert done.stderr.count("RuntimeError: out of luck") == 2


def test_process_without_stderr_logs_into_its_folder(config_file: Path, tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path}", "buffer.bind=tcp://192.0.2.1:5555"]
    command = [sys.executable, "-m", "slipstream.buffer.cli", str(config_file), *overrides]
    done = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *command], check=False, timeout=DEADLINE_S)
    assert done.returncode == CERTAIN
    assert "tcp://192.0.2.1:5555" in (tmp_path / "small" / "logs" / "buffer.jsonl").read_text()


def test_mistake_without_stderr_exits_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(SystemExit, match="2"):
        read_run_arguments(run_parser("Test."), [str(tmp_path / "absent.yaml")])
    sys.stderr.close()
