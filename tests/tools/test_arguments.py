"""What a bench is told wrongly is said before anything is measured."""

from pathlib import Path

import pytest

from slipstream.tools.bench.cli import command


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("buffer --rounds 0", "argument --rounds: 0 is less than 1"),
        ("buffer --groups -5", "argument --groups: -5 is less than 1"),
        ("buffer --path-groups 0", "argument --path-groups: 0 is less than 1"),
        ("buffer --latency-s 0", "argument --latency-s: 0 must be more than 0, and finite"),
        ("buffer --latency-s nan", "argument --latency-s: nan must be more than 0, and finite"),
        ("buffer --ready 1000 3", "argument --ready: 3 is less than 240"),
        ("weights --rounds 0", "argument --rounds: 0 is less than 1"),
        ("weights --size-mb 0", "argument --size-mb: 0 is less than 1"),
        ("weights --servers 1 0", "argument --servers: 0 is less than 1"),
        ("weights --seconds inf", "argument --seconds: inf must be more than 0, and finite"),
        ("staleness --seeds 0", "argument --seeds: 0 is less than 1"),
        ("staleness --steps x", "argument --steps: invalid number value: 'x'"),
        ("staleness --lags 0 -1", "argument --lags: -1 is less than 0"),
        (
            "staleness --plot absent/a.png",
            "argument --plot: there is no folder absent; make it, or name a file elsewhere",
        ),
        ("staleness --markdown absent/a.md", "argument --markdown: there is no folder absent; make it"),
        ("staleness --plot .", "argument --plot: . is a folder; name a file"),
    ],
)
def test_an_argument_that_can_not_be_is_a_mistake_in_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        command(arguments.split())
    assert f"error: {problem}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
