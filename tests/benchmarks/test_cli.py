"""Arguments of the benches, and the goals of figures."""

from pathlib import Path

import pytest

from benchmarks.__main__ import command
from benchmarks.figures import Figure, Goal


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("buffer --rounds 0", "--rounds"),
        ("buffer --groups -5", "--groups"),
        ("buffer --latency-s 0", "--latency-s"),
        ("buffer --latency-s nan", "--latency-s"),
        ("buffer --ready 1000 3", "--ready"),
        ("weights --servers 1 0", "--servers"),
        ("weights --seconds inf", "--seconds"),
        ("staleness --steps x", "--steps"),
        ("staleness --lags 0 -1", "--lags"),
        ("staleness --plot absent/a.png", "--plot"),
        ("staleness --plot .", "--plot"),
        ("kitchen", "part"),
    ],
)
def test_invalid_argument_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        command(arguments.split())
    assert f"error: argument {option}: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("value", "met"), [(0.59, False), (0.6, True)])
def test_figure_reports_whether_its_goal_is_met(value: float, met: bool) -> None:
    figure = Figure("group path / bare", value, "", Goal(">=", 0.6))
    assert figure.met is met
    assert figure.line.endswith("goal >= 0.6: met" if met else "goal >= 0.6: MISSED")
