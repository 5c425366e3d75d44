"""A small `slipstream bench staleness`: data that is 16 steps old, one seed, with the correction and without."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from pathlib import Path

import pytest

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.tools.bench.cli import command
from slipstream.tools.bench.staleness.studies import STUDIES, plan
from slipstream.tools.bench.staleness.workers import train_all

STEPS = 60


def test_decoupled_ppo_learns_from_stale_data_where_ppo_clipped_against_the_behaviour_policy_hardly_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, markdown = tmp_path / "staleness.png", tmp_path / "staleness.md"
    options = ["--lags", "16", "--seeds", "1", "--steps", str(STEPS), "--jobs", "1", "--runs", str(tmp_path)]
    chosen = ["--objectives", "decoupled", "behaviour-clipped", "--plot", str(plot), "--markdown", str(markdown)]
    assert command(["staleness", *options, *chosen]) == 0
    (file,) = (tmp_path / "bench").glob("staleness-decay-*.json")
    record = json.loads(file.read_text())
    value = {figure["name"]: figure["value"] for figure in record["figures"]}
    assert value["decoupled, k = 16, halfway"] > value["behaviour-clipped, k = 16, halfway"] + 0.015
    assert value["decoupled, k = 16, end"] > value["behaviour-clipped, k = 16, end"] + 0.06
    for run in record["details"]["runs"]:
        assert len(run["rewards"]) == STEPS + 1
        assert run["lags"] == [16] * STEPS
        assert run["figures"]["ess"][0] == pytest.approx(1, abs=1e-3)  # the weights that generated it
        assert run["figures"]["kl_k3"][STEPS // 2] > 0.005  # 16 steps later they are others
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = markdown.read_text().splitlines()
    assert rows[0] == "| objective | k = 16 |"
    assert len(rows) == 4
    assert [line.split(" (")[0][:5] for line in capsys.readouterr().out.splitlines()[:2]] == ["  1/2", "  2/2"]


def test_a_line_that_the_study_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="no 'ppo'; it has behaviour-clipped, decoupled"):
        command(["staleness", "--objectives", "ppo"])


def test_when_the_user_asks_for_the_end_no_worker_goes_on(tmp_path: Path) -> None:
    study = STUDIES["decay"]
    runs = plan(study, lines=["decoupled"], lags=[0], seeds=range(2), steps=100_000, folder=tmp_path)

    others = set(active_children())

    def interrupt() -> None:
        until = time.monotonic() + 120
        while set(active_children()) <= others:  # before there are workers, nobody minds signals
            assert time.monotonic() < until, "no worker was started"
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as user:
        user.submit(interrupt)
        with pytest.raises(SlipstreamError, match="SIGINT received"):
            list(train_all(runs, jobs=2))
    assert set(active_children()) <= others
