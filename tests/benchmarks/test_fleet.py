"""A small `slipstream bench fleet`: all figures are measured, printed and saved."""

from pathlib import Path

import pytest

from tests.benchmarks.conftest import measured

SMALL = ["--servers", "8", "--churn", "2", "--groups-per-step", "8", "--steps", "10", "--step-s", "0.02"]


@pytest.mark.usefixtures("nothing_left")
def test_all_figures_are_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = measured("fleet", [*SMALL, "--group-s", "0.01"], tmp_path / "runs")
    printed = capsys.readouterr().out.splitlines()
    assert [line[:46].rstrip() for line in printed[:-1]] == [figure["name"] for figure in record["figures"]]
    values = {figure["name"]: figure["value"] for figure in record["figures"]}
    assert values["servers"] == 8
    assert values["work of a server, max/mean"] < 2
    assert len([figure for figure in record["figures"] if figure["goal"]]) == 2
