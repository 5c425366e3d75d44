"""The command line that every process shares, and where it logs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.configs.arguments import parse_run_arguments, read_run_arguments, run_parser
from slipstream.configs.load import load_config

CONFIG = "run: {name: small}\nmodel: {build: digits}\n"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return path


def test_overrides_change_the_configuration(config_file: Path) -> None:
    config = parse_run_arguments("Test.", [str(config_file), "learner.steps=7", "run.seed=3"])
    assert (config.run.name, config.learner.steps, config.run.seed) == ("small", 7, 3)


def test_options_may_stand_between_overrides(config_file: Path) -> None:
    parser = run_parser("Test.")
    parser.add_argument("--fresh", action="store_true")
    arguments, config = read_run_arguments(parser, [str(config_file), "run.seed=3", "--fresh", "learner.steps=7"])
    assert arguments.fresh
    assert (config.run.seed, config.learner.steps) == (3, 7)


def test_the_printed_configuration_reads_back_to_the_same_one(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_run_arguments("Test.", [str(config_file), "learner.steps=7", "--print-config"])
    assert exit_.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load_config(printed) == load_config(config_file, ["learner.steps=7"])


def test_every_mistake_stands_on_a_line_of_its_own(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_run_arguments("Test.", [str(config_file), "learner.stps=7", "run.seed=x", "nonsense"])
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: ") for line in lines)
    assert any("learner.stps" in line and "did you mean 'steps'" in line for line in lines)


def test_nothing_but_the_file_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_run_arguments("Test.", [])
    assert capsys.readouterr().err.endswith("error: the following arguments are required: CONFIG\n")


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_run_arguments("Test.", [str(tmp_path / "absent.yaml")])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"error: there is no configuration file {tmp_path / 'absent.yaml'}\n"


@pytest.mark.parametrize(
    ("piece", "made_first"), [("buffer", "small/logs"), ("rollout_servers", "small/logs"), ("learner", "small")]
)
def test_a_folder_that_a_process_may_not_write_to_is_named(config_file: Path, piece: str, made_first: str) -> None:
    command = [sys.executable, "-m", f"slipstream.{piece}.cli", str(config_file), f"run.dir={config_file}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: run.dir={config_file}: can't write {config_file}/{made_first}: Not a directory; name a folder for "
        "runs that this process may write to and whose disk has room\n"
    )


CRASH = """
import sys, threading
from slipstream.configs.arguments import log_run, parse_run_arguments

def crash():
    raise RuntimeError("out of luck")

log_run(parse_run_arguments("Test."), "crashing")
thread = threading.Thread(target=crash)
thread.start()
thread.join()
crash()
"""


def test_what_ends_a_process_or_a_thread_unexpectedly_is_in_the_log(config_file: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(config_file), f"run.dir={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 1
    records = [json.loads(line) for line in (tmp_path / "small" / "logs" / "crashing.jsonl").read_text().splitlines()]
    assert [(record["level"], record["error"]) for record in records] == [("critical", "out of luck")] * 2
    assert all("in crash" in record["exception"] for record in records)
    assert done.stderr.count("RuntimeError: out of luck") == 2


def test_a_process_whose_stderr_is_closed_logs_into_its_folder(config_file: Path, tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path}", "buffer.bind=tcp://192.0.2.1:5555"]
    command = [sys.executable, "-m", "slipstream.buffer.cli", str(config_file), *overrides]
    done = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *command], check=False, timeout=110)
    assert done.returncode == 1
    assert "can't listen on tcp://192.0.2.1:5555" in (tmp_path / "small" / "logs" / "buffer.jsonl").read_text()


def test_a_mistake_ends_a_process_whose_stderr_is_closed_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(SystemExit) as exit_:
        parse_run_arguments("Test.", [str(tmp_path / "absent.yaml")])
    sys.stderr.close()
    assert exit_.value.code == 2
