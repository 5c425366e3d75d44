"""The console script `learner`."""

import json
import subprocess
import sys
from pathlib import Path

from tests.full_disk import files_of_at_most

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


def test_a_disk_without_room_is_told_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slipstream.learner.cli", str(DEMO), f"run.dir={tmp_path}"]
    with files_of_at_most(10_000):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (record,) = map(json.loads, (tmp_path / "demo" / "logs" / "learner.jsonl").read_text().splitlines())
    assert record["event"] == "learner failed"
    assert "File too large" in record["error"]
    assert f"see that {tmp_path / 'demo'} has room" in record["error"]
