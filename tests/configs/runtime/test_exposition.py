"""`/metrics` of a process, and the file by which Prometheus finds it."""

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.exposition import Reading, serve_metrics
from tests.conftest import free_port

READINGS = (
    Reading("buffer_groups", "groups at the moment", {"ready": 3.0, "lea\nsed": 2.0}, "state"),
    Reading("server_tokens", "action tokens", 7, counts=True),
)


def scrape(folder: Path, process: str) -> tuple[str, dict[str, str]]:
    (found,) = json.loads((folder / f"{process}.json").read_text())
    (target,) = found["targets"]
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as answer:
        return answer.read().decode(), found["labels"]


def test_two_processes_serve_at_neighbouring_ports(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    for process in ("rollout", "rollout-1"):
        serve_metrics(address, tmp_path, run="demo", process=process, read=lambda: READINGS, server=f"of {process}")
    text, labels = scrape(tmp_path, "rollout-1")
    assert labels == {"job": "slipstream", "run": "demo", "process": "rollout-1"}
    assert 'slipstream_server_tokens_total{server="of rollout-1"} 7.0' in text
    assert 'slipstream_buffer_groups{server="of rollout-1",state="lea\\nsed"} 2.0' in text
    assert "process_resident_memory_bytes" in text
    assert 'server="of rollout"' in scrape(tmp_path, "rollout")[0]
    if (promtool := shutil.which("promtool")) is not None:
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_nothing_is_served_without_an_address(tmp_path: Path) -> None:
    serve_metrics(None, tmp_path / "prometheus", run="demo", process="buffer", read=lambda: READINGS)
    assert not (tmp_path / "prometheus").exists()


def test_foreign_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.prometheus"):
        serve_metrics("192.0.2.1:9400", tmp_path, run="demo", process="buffer", read=lambda: READINGS)
