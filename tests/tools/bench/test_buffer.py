"""A tiny run of `slipstream bench buffer`: every figure is measured, shown and kept. Times are none of its business."""

import json
import tempfile
from pathlib import Path

import psutil
import pytest

from slipstream.tools.bench.cli import command
from slipstream.tools.bench.figures import Figure, Goal

GOALS = {
    "group path / bare",
    "last token to ready at half load, p99",
    "lease, fifo, 600 / 300 ready",
    "lease, prioritized, 600 / 300 ready",
    "service's memory, growth",
}
TINY = ["--groups", "128", "--path-groups", "128", "--rounds", "1", "--latency-s", "0.2", "--ready", "300", "600"]


def test_every_figure_gets_a_line_and_is_kept_and_no_process_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    others = set(psutil.Process().children())
    assert command(["buffer", *TINY, "--runs", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (file,) = (tmp_path / "runs" / "bench").glob("buffer-*.json")
    record = json.loads(file.read_text())
    figures = record["figures"]
    assert lines[-1] == f"kept in {file}"
    assert [line.split("  ")[0] for line in lines[:-1] if not line.startswith(" ")] == [
        figure["name"] for figure in figures if not figure["name"].startswith(" ")
    ]
    assert len(lines) - 1 == len(figures)
    assert {figure["name"] for figure in figures if figure["goal"]} == GOALS
    assert {"group path, 1 shards", "group path, 4 shards", "lease, fifo, 4 shards"} <= {
        figure["name"] for figure in figures
    }
    assert any(figure["name"].startswith("  service: ") for figure in figures)
    assert record["details"]["group_bytes"] > 8 * 1024 * 9
    assert set(psutil.Process().children()) <= others
    assert list(temporary.iterdir()) == []


def test_an_unknown_part_is_named_and_help_tells_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(["kitchen"])
    assert "'kitchen'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        command(["--help"])
    assert "staleness" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "met"), [(0.59, False), (0.6, True)])
def test_a_figure_says_whether_its_goal_is_met(value: float, met: bool) -> None:
    figure = Figure("group path / bare", value, "", Goal(">=", 0.6))
    assert figure.met is met
    assert figure.line.endswith("goal >= 0.6: met" if met else "goal >= 0.6: MISSED")
