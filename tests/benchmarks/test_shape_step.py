"""Small runs of the benches of a learner's step: by length, on a GPU, and beside the computed memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from benchmarks import gpu_learner
from tests.benchmarks.conftest import measured


@pytest.mark.usefixtures("nothing_left")
def test_length_bench_measures_and_draws(tmp_path: Path) -> None:
    plots = [tmp_path / "length.png", tmp_path / "ranks.png"]
    arguments = ["--lengths", "64", "--tokens", "256", "--ranks", "1", "2"]
    record = measured("length", [*arguments, "--plot", str(plots[0]), "--plot-ranks", str(plots[1])], tmp_path / "runs")
    assert [figure["name"].strip() for figure in record["figures"]] == [
        "1 rank, answers of 64", "2 ranks, answers of 64", "speed by that of one rank",
    ]  # fmt: skip
    assert all(figure["value"] > 0 for figure in record["figures"])
    one, two = record["details"]["steps"]
    # Both ranks train on the same answers as one: one loss, one gradient.
    for figure in ("loss", "grad_norm", "actions"):
        assert two["figures"][figure] == pytest.approx(one["figures"][figure], rel=1e-3, abs=1e-5), figure
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)


@pytest.mark.usefixtures("nothing_left")
def test_computed_memory_is_near_the_measured_peak(tmp_path: Path) -> None:
    record = measured("fit", ["--variants", "1", "--tokens", "512"], tmp_path / "runs")
    peak, computed, error = (figure["value"] for figure in record["figures"])
    assert peak > 300  # MB: weights, gradients and AdamW's averages of 26 million parameters are 420
    assert computed == pytest.approx(peak, rel=0.3)
    assert error == pytest.approx(abs(computed / peak - 1))


@pytest.mark.usefixtures("nothing_left")
def test_gpu_bench_runs_tiny_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_learner, "configure_logging", lambda *_, **__: None)  # it would outlive the test
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    given = ["--json", str(tmp_path / "out" / "gpu.json"), "--tokens", "64", "--micro-batches", "2", "--steps", "1"]
    with pytest.raises(ConfigError, match="CUDA"):
        gpu_learner.measure(given)
    gpu_learner.measure([*given, "--shapes", "tiny"])
    record: dict[str, Any] = json.loads((tmp_path / "out" / "gpu.json").read_text(encoding="utf-8"))
    utilisation = record["figures"][0]
    assert utilisation["name"].startswith("tiny, 64 tokens") and 0 < utilisation["value"] < 1.5
    assert record["details"]["tiny"]["measured"]["tokens"] == 128
