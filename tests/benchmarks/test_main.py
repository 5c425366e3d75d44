"""The command line of the measurements, their figures and files."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import PARTS, command
from benchmarks.figures import Figure, Figures, Goal


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("buffer --rounds 0", "--rounds"), ("buffer --groups -5", "--groups"), ("buffer --latency-s 0", "--latency-s"),
        ("buffer --latency-s nan", "--latency-s"), ("buffer --ready 1000 3", "--ready"),
        ("weights --servers 1 0", "--servers"), ("weights --seconds inf", "--seconds"),
        ("staleness --steps x", "--steps"), ("staleness --lags 0 -1", "--lags"),
        ("staleness --plot absent/a.png", "--plot"), ("fleet --json .", "--json"), ("kitchen", "part"),
    ],
)  # fmt: skip
def test_invalid_argument_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        command(arguments.split())
    assert f"error: argument {option}: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", PARTS)
def test_each_part_has_help(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command([part, "--help"])
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "met"), [(0.59, False), (0.6, True)])
def test_figure_reports_whether_its_goal_is_met(value: float, met: bool) -> None:
    figure = Figure("group path / bare", value, "", Goal(">=", 0.6))
    assert figure.met is met
    assert figure.line.endswith("goal >= 0.6: met" if met else "goal >= 0.6: MISSED")


def test_file_has_figures_settings_and_machine_without_paths(tmp_path: Path) -> None:
    figures, file = Figures(), tmp_path / "out.json"
    figures.show(Figure("speed", 2.0, "MB/s", Goal("<", 1.0)))
    figures.save(file, settings={"rounds": 3, "json": file}, details={"raw": [1.0, 3.0]})
    record = json.loads(file.read_text(encoding="utf-8"))
    speed = {"name": "speed", "value": 2.0, "unit": "MB/s", "goal": {"relation": "<", "bound": 1.0}, "met": False}
    assert record["figures"] == [speed]
    assert (record["settings"], record["details"], record["failed"]) == ({"rounds": 3}, {"raw": [1.0, 3.0]}, {})
    assert {"cpu", "cores", "load", "memory_bytes", "gpus", "packages"} == record["machine"].keys()
    assert record["machine"]["packages"].keys() >= {"python", "torch", "transformers"}
