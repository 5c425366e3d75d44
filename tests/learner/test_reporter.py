"""The end of a run: its summary is what it counts as finished by."""

import json
import time
from pathlib import Path

import pytest

from slipstream.buffer.wire.messages import EvalReport
from slipstream.configs.folder import RunFolder
from slipstream.learner.checkpoint import Progress
from slipstream.learner.reporter import Reporter
from slipstream.learner.tracking.jsonl import JsonlTracker
from slipstream.learner.weights.publication import SyncFigures
from tests.conftest import files_of_at_most
from tests.learner.test_summary import STATE, step


def test_an_evaluation_is_recorded_with_the_steps_that_were_done_also_by_a_learner_that_has_trained_none(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    tracker = JsonlTracker(folder.metrics)
    reporter = Reporter([tracker], SyncFigures(), steps=20, dtype="float32", started=time.time())
    nothing = EvalReport(version=10, score=0.0, tasks=0, failed=8, eval_s=1.0, group_ids=[])
    some = EvalReport(version=11, score=0.5, tasks=6, failed=2, eval_s=1.0, group_ids=["e11-0"])
    reporter.evaluated(20, [nothing, some])
    tracker.close()
    (record,) = map(json.loads, folder.metrics.read_text(encoding="utf-8").splitlines())
    assert (record["step"], record["policy_version"], record["tasks"], record["failed"]) == (20, 11, 6, 2)


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
