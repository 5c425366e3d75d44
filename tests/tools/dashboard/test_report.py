"""`slipstream report`: one file that needs nothing else."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.tools.dashboard.report import DATA_BYTES, page
from tests.tools.conftest import CommandLine
from tests.tools.dashboard.chromium import EXECUTABLE, chromium
from tests.tools.dashboard.recorded import HOSTILE_TEXT, append, make_run, step


def embedded(file: Path) -> dict[str, Any]:
    """The data of a report."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', file.read_text())
    data: dict[str, Any] = json.loads(text)
    return data


def test_report_holds_the_page_and_the_answers_to_it(cli: CommandLine, tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path, name)
    out = tmp_path / "out.html"
    assert cli("report", tmp_path / "runs" / "a", tmp_path / "runs" / "b", "-o", out) == 0, cli.err
    assert str(out) in cli.out
    assert cli.out.count("no account") == 2, "without a ledger"
    data = embedded(out)
    assert {run["id"] for run in data["runs"]} == {"a", "b"}
    assert [row["key"] for row in data["compare"]["keys"]] == ["run.name"]
    assert data["runs/a/series"]["columns"]["reward"] == [0.1, 0.2, 0.3, 0.4]
    assert data["runs/a/series?kind=eval"]["columns"]["score"] == [0, 0.25]
    assert data["runs/a"]["run"][0]["packages"] == {"torch": "2.13.0"}
    listed = data["runs/b/samples"]["samples"]
    assert [sample["kind"] for sample in listed] == ["step"] * 4 + ["eval"]
    assert all(data[f"runs/b/samples/{sample['id']}"]["stretches"] for sample in listed)
    assert len(data["runs/a/prompts/5"]["samples"]) == 4
    assert data["runs/a/events"][0]["text"] == HOSTILE_TEXT.replace("\ud800", "?")


def test_report_loads_nothing_and_runs_only_the_page(tmp_path: Path) -> None:
    text = page({"runs": [{"id": f"</script>{HOSTILE_TEXT}<!--"}]}).decode()
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    for script in scripts:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert text.count("</script>") == len(scripts) + 1


def test_a_long_run_is_thinned_to_fit(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "long").mkdir()
    keys = {f"key/{number}": number / 7 for number in range(300)}
    append(tmp_path / "long" / "metrics.jsonl", *(step(number, **keys) for number in range(1, 1201)))
    assert cli("report", tmp_path / "long", "-o", tmp_path / "out.html") == 0, cli.err
    assert (tmp_path / "out.html").stat().st_size < DATA_BYTES
    series = embedded(tmp_path / "out.html")["runs/long/series"]
    assert (len(series["columns"]), series["step"][-1], series["total"]) == (304, 1200, 1200)
    assert len(series["step"]) < 1200


@pytest.mark.parametrize(("runs", "named"), [(["none"], "'none'"), (["."], "config.yaml")])
def test_no_run_is_refused(cli: CommandLine, tmp_path: Path, runs: list[str], named: str) -> None:
    assert cli("report", *runs, "-o", "out.html", folder=tmp_path) == 2
    assert named in cli.err
    assert not (tmp_path / "out.html").exists()


@pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed")
def test_report_opens_from_a_file_without_errors(cli: CommandLine, tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    out = tmp_path / "out.html"
    assert cli("report", tmp_path / "runs" / "a", "-o", out) == 0
    with chromium(tmp_path / "profile") as browser:
        browser.call("Page.navigate", url=out.as_uri())
        for view in ("overview", "metrics", "samples", "samples/step-000000001-0", "prompts/5", "account", "run"):
            browser.evaluate(f"location.hash = '#/{view}'")
            browser.wait("document.querySelector('main')?.innerText.length > 20")
        assert browser.problems == []
