"""A run's recorded training steps: their records, metrics, groups and checkpoints, without the run's processes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slipstream.buffer.wire.codec import FrameError, decode_group
from slipstream.buffer.wire.messages import Group
from slipstream.configs import RunConfig
from slipstream.configs.paths import RunPaths, checkpoint_steps
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.learner.step_records import RecordedStep, read_step_records
from slipstream.tools.ledger.open import OpenLedger, find_run, with_ledger

if TYPE_CHECKING:
    from slipstream.tools.rewind.replay import Session

GROUPS_PER_READ = 16


@dataclass
class Recording:
    """What is left of a run's training steps; closed at the end of a `with` block, or by `close`."""

    folder: RunPaths
    steps: Mapping[int, RecordedStep]
    """By number, as in `metrics.jsonl`."""
    cleanup: ExitStack = field(default_factory=ExitStack)
    """Releases what replays hold."""
    session: "Session | None" = None
    """Models of replays, see `replay`."""
    _metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    _blobs: dict[str, bytes] = field(default_factory=dict)
    """Bytes of groups that were read from the ledger."""

    @classmethod
    def open(cls, run: str | Path | None) -> Self:
        """Opens a run: its folder, its name under runs/, a configuration file of it; None: the latest.

        Raises: ConfigError when there is no such run, SlipstreamError when it has no recorded steps.
        """
        folder, _ = find_run(None if run is None else str(run))
        try:
            steps = read_step_records(folder.steps)
        except OSError as error:
            raise SlipstreamError(
                f"{folder.steps} can't be read: {error.strerror}; a learner of this release records its steps there"
            ) from None
        if not steps:
            raise SlipstreamError(f"{folder.steps} has no steps: the learner has not finished one")
        return cls(folder, steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees models and temporary files of replays."""
        self.cleanup.close()

    @property
    def checkpoints(self) -> list[int]:
        """Steps after which a replay can begin, ascending: 0, the initial model, and those of the checkpoints."""
        return [0, *checkpoint_steps(self.folder.checkpoints)]

    def config(self, step: int) -> RunConfig:
        """The settings of a step, with the run's folder where it is now. Raises: ConfigError."""
        config = RunConfig.model_validate(self.steps[step].start.config)
        place = {"dir": self.folder.root.absolute().parent, "name": self.folder.name}
        return config.model_copy(update={"run": config.run.model_copy(update=place)})

    def metrics(self, step: int) -> dict[str, Any]:
        """The record of a step in `metrics.jsonl`; empty if there is none."""
        if not self._metrics:
            self._metrics = _step_metrics(self.folder.metrics)
        return self._metrics.get(step, {})

    def group(self, group_id: str) -> Group:
        """A group. Raises: SlipstreamError when it is not kept, or in no recorded step."""
        for step, recorded in self.steps.items():
            if group_id in recorded.record.groups:
                return self.groups(step)[recorded.record.groups.index(group_id)]
        raise SlipstreamError(f"no recorded step has a group {group_id!r}")

    def groups(self, step: int) -> list[Group]:
        """The groups of a step, in order. Raises: SlipstreamError when one is not kept."""
        self.fetch([step])
        return [_decoded(group_id, self._blobs[group_id]) for group_id in self.steps[step].record.groups]

    def fetch(self, steps: Iterable[int]) -> None:
        """Reads the groups of steps from the ledger at once. Raises: SlipstreamError when one is not kept."""
        of_step = {step: self.steps[step].record.groups for step in steps}
        missing = [group_id for ids in of_step.values() for group_id in ids if group_id not in self._blobs]
        if missing:
            self._blobs |= self._from_ledger(missing)
        for step, ids in of_step.items():
            lost = [group_id for group_id in ids if group_id not in self._blobs]
            if lost:
                raise SlipstreamError(
                    f"step {step}: {len(lost)} of its {len(ids)} groups are not kept, such as {lost[0]}; "
                    "buffer.keep_trained says of how many of the latest steps a run keeps them"
                )

    def _from_ledger(self, group_ids: Sequence[str]) -> dict[str, bytes]:
        blobs: dict[str, bytes] = {}

        async def read(opened: OpenLedger) -> int:
            for first in range(0, len(group_ids), GROUPS_PER_READ):
                found = await opened.reader.groups(group_ids[first : first + GROUPS_PER_READ])
                blobs.update({record.id: record.blob for record in found if record and record.blob is not None})
            return 0

        with_ledger(str(self.folder.root), read)
        return blobs


def _step_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """The records of steps in a metrics file, of one that was trained twice the last. Raises: OSError."""
    records = {}
    with path.open("rb") as lines:
        for line in lines:
            with suppress(ValueError):  # a truncated line
                record = json.loads(line)
                if record["kind"] == "step":
                    records[record["step"]] = record
    return records


def _decoded(group_id: str, blob: bytes) -> Group:
    try:
        return decode_group(blob)
    except FrameError as error:
        raise SlipstreamError(f"group {group_id} can't be decoded: {error}") from error
