"""A small `slipstream bench staleness`, and its workers."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from pathlib import Path

import pytest

from slipstream.configs.runtime.errors import ConfigError
from benchmarks.__main__ import command
from benchmarks.staleness import STUDIES, plan, train_all
from benchmarks.workers import Stopped
from tests.benchmarks.conftest import measured

STEPS = 60


def test_correction_learns_from_stale_data_clipping_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "staleness.png"
    arguments = ["--lags", "16", "--seeds", "1", "--steps", str(STEPS), "--jobs", "1"]
    arguments += ["--objectives", "decoupled", "behaviour-clipped", "--plot", str(plot)]
    record = measured("staleness", arguments, tmp_path)
    value = {figure["name"]: figure["value"] for figure in record["figures"]}
    assert value["decoupled, k = 16, area"] > value["behaviour-clipped, k = 16, area"]
    assert value["decoupled, k = 16, end"] > value["behaviour-clipped, k = 16, end"] + 0.06
    for run in record["details"]["runs"]:
        assert len(run["rewards"]) == STEPS + 1
        assert run["lags"] == [16] * STEPS
        assert run["figures"]["ess"][0] == pytest.approx(1, abs=1e-3)  # the weights that generated the groups
        assert run["figures"]["kl_k3"][STEPS // 2] > 0.005  # 16 steps later they differ
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows[0] == "| objective | k = 16 |"
    assert len(rows) == 4


def test_unknown_objective_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--objectives ppo: .*behaviour-clipped, decoupled"):
        command(["staleness", "--objectives", "ppo"])


def test_signal_ends_all_workers(tmp_path: Path) -> None:
    runs = plan(STUDIES["decay"], ["decoupled"], lags=[0], seeds=2, steps=100_000, folder=tmp_path)
    before = set(active_children())

    def interrupt() -> None:
        deadline = time.monotonic() + 120
        while set(active_children()) <= before:  # without workers nothing checks for signals
            assert time.monotonic() < deadline, "no worker was started"
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as user:
        interrupted = user.submit(interrupt)
        with pytest.raises(Stopped, match="SIGINT"):
            list(train_all(runs, jobs=2))
        interrupted.result()
    assert set(active_children()) <= before
