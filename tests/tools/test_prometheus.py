"""A real Prometheus scrapes a real run: `make prometheus-check`."""

import json
import os
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.tools.grafana import dashboard
from tests.conftest import free_port
from tests.tools.run_command import DEMO, command, until_within

CHECK = "SLIPSTREAM_PROMETHEUS_CHECK"
ABSENT = ("buffer_filtered", "buffer_expired", "buffer_answers_dropped", "buffer_length_bias", "kv_cache_ratio",
          "answers_running", "answers_waiting")  # fmt: skip
"""Metrics that a run need not have: without drops, or of an engine that does not report its load."""

pytestmark = [
    pytest.mark.skipif(CHECK not in os.environ, reason=f"make prometheus-check sets {CHECK}"),
    pytest.mark.timeout(900),
]


@contextmanager
def prometheus(folder: Path, targets: str) -> Iterator[str]:
    """A server that scrapes each second the processes of these discovery files."""
    server, port = shutil.which("prometheus"), free_port()
    assert server is not None, "install Debian's package prometheus"
    discovery = {"job_name": "slipstream", "file_sd_configs": [{"files": [targets], "refresh_interval": "1s"}]}
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [discovery]}))
    subprocess.run(["promtool", "check", "config", config], check=True, stdout=subprocess.DEVNULL)
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([server, *options, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)
        try:
            until_within(120, lambda: is_ready(f"http://127.0.0.1:{port}"))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def is_ready(server: str) -> bool:
    try:
        with urllib.request.urlopen(f"{server}/-/ready", timeout=30) as got:
            return bool(got.status == 200)
    except OSError:
        return False


def answer(server: str, query: str) -> list[dict[str, object]]:
    with urllib.request.urlopen(f"{server}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=30) as got:
        found: list[dict[str, object]] = json.load(got)["data"]["result"]
    return found


def queries() -> list[str]:
    """The dashboard's, for all runs."""
    text = [target["expr"] for panel in json.loads(dashboard())["panels"] for target in panel.get("targets", ())]
    return [each.replace("$__rate_interval", "10s").replace("$run", ".+") for each in text]


def test_every_query_of_the_dashboard_has_data_in_a_run(tmp_path: Path) -> None:
    overrides = [
        f"run.dir={tmp_path}", "run.name=scraped", "learner.steps=400", "eval.every_steps=10", "eval.tasks=32",
        f"tracking.prometheus={free_port()}",
    ]  # fmt: skip
    folder = tmp_path / "scraped" / "prometheus"
    unanswered = set(queries())
    with (
        (tmp_path / "up.log").open("wb") as log,
        subprocess.Popen(command("up", DEMO, "--plain", *overrides), stdout=log, stderr=log) as run,
    ):
        try:
            until_within(300, lambda: len(list(folder.glob("*.json"))) == 3)
            with prometheus(tmp_path, f"{folder}/*.json") as server:

                def all_answered() -> bool:
                    nonlocal unanswered
                    assert run.poll() is None, (tmp_path / "up.log").read_text()
                    unanswered -= {query for query in unanswered if answer(server, query)}
                    return all(re.search("|".join(ABSENT), query) for query in unanswered)

                until_within(300, all_answered)
                assert {each["metric"]["process"] for each in answer(server, "up == 1")} == {  # type: ignore[index]
                    "buffer", "learner", "rollout",
                }  # fmt: skip
        finally:
            run.terminate()
    assert not list(folder.glob("*.json")), "a process that ends removes its file"
    print("without data:", sorted(unanswered))  # noqa: T201
