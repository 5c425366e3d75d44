"""A small `slipstream bench buffer`: all figures are measured, printed and saved."""

from pathlib import Path

import pytest

from tests.benchmarks.conftest import measured

GOALS = {
    "group path / bare",
    "last token to ready at half load, p99",
    "lease, fifo, 600 / 300 ready",
    "lease, prioritized, 600 / 300 ready",
    "service's memory, growth",
}
SMALL = [
    "--groups",
    "128",
    "--spilled-groups",
    "1",
    "--path-groups",
    "128",
    "--rounds",
    "1",
    "--latency-s",
    "0.2",
    "--ready",
    "300",
    "600",
]


@pytest.mark.usefixtures("nothing_left")
def test_all_figures_are_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = measured("buffer", SMALL, tmp_path / "runs")
    figures = record["figures"]
    printed = capsys.readouterr().out.splitlines()
    assert [line[:46].rstrip() for line in printed[:-1]] == [figure["name"] for figure in figures]
    assert {figure["name"] for figure in figures if figure["goal"]} == GOALS
    # Growth may be negative, and the CPU time of a few groups less than a clock tick.
    measured_values = [each["value"] for each in figures if "growth" not in each["name"] and "CPU" not in each["name"]]
    assert all(value > 0 for value in measured_values)
    assert {"  CPU of redis", "  CPU of producer"} < {figure["name"] for figure in figures}
    assert record["details"]["group_bytes"] > 8 * 1024 * 9
