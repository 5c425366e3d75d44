"""Records of training steps."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from slipstream.learner.models.reproducibility import Surroundings
from slipstream.learner.step_records import StartRecord, StepRecord, StepRecords, read_step_records

HERE = Surroundings(ranks=1, device="cpu", threads=1, cpu="", versions={})


def start(step: int) -> StartRecord:
    config = {"run": {}, "env": {"options": {"most": float("inf")}}}
    return StartRecord(time_s=0.0, step=step, checksum="", config=config, surroundings=HERE)


def record(step: int, *, group: str = "1") -> StepRecord:
    return StepRecord(
        step=step, groups=[group], importance_weights=[1.0], oldest_version=0, staleness=[1, 0], consuming_version=1,
        unpublished_steps=0, lr_scale=0.5, kl_coefficient=None, checksum="0f",
    )  # fmt: skip


def append(path: Path, *records: StartRecord | StepRecord) -> None:
    file = StepRecords(path)
    for each in records:
        file.append(each)
    file.close()


def test_steps_of_the_latest_start_count(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    append(path, start(0), record(1), record(2), record(3), start(1), record(2, group="7"))
    steps = read_step_records(path)
    assert {step: known.record.groups for step, known in steps.items()} == {1: ["1"], 2: ["7"]}
    assert (steps[1].start, steps[2].start) == (start(0), start(1))
    assert steps[1].record == record(1)
    assert steps[1].record.lease.staleness_of == {0: 1, 1: 0}


@pytest.mark.parametrize("torn", [b'{"kind": "step", "st', b"\xff", b'{"kind": "step"}\n', b"3\n", b"{}\n"])
def test_incomplete_lines_are_skipped(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    append(path, start(0), record(1))
    path.write_bytes(path.read_bytes() + torn)
    assert read_step_records(path).keys() == {1}
    append(path, record(2))
    assert read_step_records(path).keys() == {1, 2}


def test_failure_to_write_is_logged_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    records = StepRecords(tmp_path / "file" / "steps.jsonl")
    with capture_logs() as logs:
        records.append(start(0))
        records.append(record(1))
    assert len(logs) == 1
