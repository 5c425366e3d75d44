"""The check of one GPU: its figures of weight updates, from the metrics of its two runs of the pipeline."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import results, runs


def test_seconds_of_an_update_are_of_both_transports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (runs, results):
        monkeypatch.setattr(module, "OUT", tmp_path)
    monkeypatch.setattr(runs, "WORK", tmp_path)
    for name, seconds in (("pipeline", 0.25), ("pipeline_shm", 0.5)):
        (folder := tmp_path / "runs" / name).mkdir(parents=True)
        step = {"kind": "step", "weight_sync_s": seconds, "publish_s": 0.125, "tokens": 8, "step_s": 2, "train_s": 1}
        (folder / "metrics.jsonl").write_text(json.dumps(step) + "\n", encoding="utf-8")
        runs.summary(name)
    runs.updates()
    found = json.loads((tmp_path / "runs.json").read_text(encoding="utf-8"))["seconds of an update"]
    assert {transport: figures["weight_sync_s"] for transport, figures in found.items()} == {"ipc": 0.25, "shm": 0.5}
    assert found["ipc"]["publish_s"] == 0.125
