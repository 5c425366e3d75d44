"""Records of training steps, `steps.jsonl`: what a replay needs to know besides groups and checkpoint."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from slipstream.buffer.store.types import LeasedGroups
from slipstream.learner.models.reproducibility import Surroundings

START: Final = "start"
STEP: Final = "step"
"""Kinds of lines."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A training step as it was done."""

    step: int
    """Steps done with it, as in `metrics.jsonl`."""
    groups: list[str]
    """Ids of its groups, in order."""
    importance_weights: list[float]
    """Of the groups."""
    oldest_version: int
    staleness: list[int]
    """Staleness of tokens of `oldest_version`, of the version after it, and so on."""
    consuming_version: int
    unpublished_steps: int
    """Steps before it since the consuming version was published."""
    lr_scale: float
    """Factor of the learning rate that the throttle had set."""
    kl_coefficient: float | None
    """Coefficient of the KL penalty in this step; None without one."""
    checksum: str
    """Of the trained weights after the step, see `models.reproducibility`."""

    @property
    def lease(self) -> LeasedGroups:
        """The groups as they were leased."""
        return LeasedGroups(self.groups, self.importance_weights, self.oldest_version, self.staleness)


@dataclass(frozen=True, kw_only=True)
class StartRecord:
    """A start of the learner: settings and surroundings of the steps that follow."""

    time_s: float
    """Seconds since 1970."""
    step: int
    """Steps that were done before."""
    checksum: str
    """Of the weights at the start."""
    config: dict[str, Any]
    """All settings."""
    surroundings: Surroundings


@dataclass(frozen=True)
class RecordedStep:
    """A step, and the start of the learner that did it."""

    record: StepRecord
    start: StartRecord


def append_record(path: Path, record: StartRecord | StepRecord) -> None:
    """Appends a record to a run's file, after ending a line that was left incomplete. Raises: OSError."""
    kind = START if isinstance(record, StartRecord) else STEP
    line = json.dumps({"kind": kind, **asdict(record)}).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            line = b"\n" + line
        left = memoryview(line)
        while left:
            left = left[file.write(left) :]


def read_step_records(path: Path) -> dict[int, RecordedStep]:
    """The steps in a file, by number; of one that was trained twice the last, and no undone ones.

    Lines that are incomplete, or of another release, are skipped. Raises: OSError.
    """
    steps: dict[int, RecordedStep] = {}
    start: StartRecord | None = None
    with path.open("rb") as file:
        for line in file:
            match _parse(line):
                case StartRecord() as start:
                    steps = {step: known for step, known in steps.items() if step <= start.step}
                case StepRecord() as record if start is not None:
                    steps[record.step] = RecordedStep(record, start)
    return steps


def _parse(line: bytes) -> StepRecord | StartRecord | None:
    try:
        content = json.loads(line)
        kind: type[StartRecord | StepRecord] = StartRecord if content.pop("kind") == START else StepRecord
        return msgspec.convert(content, kind)
    except (ValueError, KeyError, AttributeError, msgspec.ValidationError):
        return None
