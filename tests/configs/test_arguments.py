"""The command line that every process shares."""

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


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_run_arguments("Test.", [str(tmp_path / "absent.yaml")])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"error: there is no configuration file {tmp_path / 'absent.yaml'}\n"
