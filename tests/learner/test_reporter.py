"""The end of a run: its summary is what it counts as finished by."""

import json
import time
from pathlib import Path

import pytest

from slipstream.configs.folder import RunFolder
from slipstream.learner.checkpoint import Progress
from slipstream.learner.reporter import Reporter
from slipstream.learner.tracking.jsonl import JsonlTracker
from slipstream.learner.weights.publication import SyncFigures
from tests.conftest import files_of_at_most
from tests.learner.test_summary import STATE, step


def test_a_summary_that_finds_no_room_is_not_there_and_the_learner_that_comes_back_writes_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    tracker = JsonlTracker(folder.metrics)
    for number in (1, 2, 3):
        tracker.log(step(number))
    reporter = Reporter([tracker], SyncFigures(), steps=2, dtype="float32", started=time.time())
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"):
        reporter.finish(Progress(step=2, version=9), STATE, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    reporter.finish(Progress(step=2, version=9), STATE, folder)
    summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    assert (summary["steps"], summary["policy_version"]) == (2, 9)
