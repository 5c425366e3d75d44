"""The console script `rollout`."""

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("env.name=digitz", "there is no env 'digitz' (did you mean 'digits'?)"),
        ("rewards=[{name: exact_macht}]", "there is no reward 'exact_macht' (did you mean 'exact_match'?)"),
        ("model={path: /nowhere}", "model.path=/nowhere holds no config.json"),
    ],
    ids=["env", "reward", "model"],
)
def test_a_name_that_means_nothing_is_reported_before_the_engine_starts(
    override: str, complaint: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "slipstream.rollout_servers.cli", str(DEMO), f"run.dir={tmp_path}", override]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert result.returncode == 1
    assert complaint in result.stderr
    assert "engine starts" not in result.stderr
    assert "Traceback" not in result.stderr
