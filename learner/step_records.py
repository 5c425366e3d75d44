"""Records of training steps, `steps.jsonl`: what a replay needs to know besides groups and checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from slipstream.buffer.store.types import LeasedGroups
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.metrics.trackers import LineFile
from slipstream.learner.models.reproducibility import Surroundings

log = get_log("learner.records")

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


class StepRecords:
    """Appends records to a run's file. A failure to write is logged once, and costs the records from there on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: LineFile | None = None
        self._is_broken = False

    def append(self, record: StartRecord | StepRecord) -> None:
        """Appends a record."""
        if self._is_broken:
            return
        content = {"kind": START if isinstance(record, StartRecord) else STEP, **msgspec.to_builtins(record)}
        try:
            if self._file is None:
                self._file = LineFile(self._path)
            # Infinity included, as Python reads it: options of plug-ins may have it.
            self._file.append(json.dumps(content))
        except OSError as error:
            self._is_broken = True
            log.warning("steps are no longer recorded", file=str(self._path), error=str(error))

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


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
