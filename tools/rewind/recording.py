"""A run's recorded training steps: their records, metrics, groups and checkpoints, without the run's processes."""

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slipstream.buffer.store.kept import KeptGroups
from slipstream.buffer.store.reader import STORED
from slipstream.buffer.wire.codec import FrameError, decode_group
from slipstream.buffer.wire.messages import Group
from slipstream.configs import RunConfig
from slipstream.configs.paths import RunPaths, checkpoint_steps
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.learner.step_records import RecordedStep, read_step_records
from slipstream.tools.ledger.open import OpenLedger, find_run, with_ledger
from slipstream.tools.rewind.series import read_metrics

if TYPE_CHECKING:
    from slipstream.tools.rewind.session import Session

GROUPS_PER_READ = 16


@dataclass
class Recording:
    """The training steps of a run as its folder has them; closed at the end of a `with` block, or by `close`."""

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
        folder, config = find_run(None if run is None else str(run))
        if not config.uses_buffer:
            raise SlipstreamError(
                f"run {config.run.name} has no recorded steps: only the trainer rl records them, and it is one of "
                f"{config.learner.trainer.name}"
            )
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
    def _kept(self) -> KeptGroups:
        return KeptGroups(self.folder.kept_groups)

    @property
    def checkpoints(self) -> list[int]:
        """Steps after which a replay can begin, ascending: 0, the initial model, and those of the checkpoints."""
        return [0, *checkpoint_steps(self.folder.checkpoints)]

    @property
    def replayable(self) -> list[range]:
        """The steps that can be replayed, in ranges that each begin after a checkpoint."""
        return self._ranges(self._steps_in_files() | self._steps_in_ledger())

    def checkpoint_before(self, first: int, last: int) -> int:
        """The latest checkpoint before `first`, from which the steps up to `last` can be replayed.

        Raises: SlipstreamError when there is none.
        """
        ranges = self._ranges(self._steps_in_files())
        if not any(first in steps and last in steps for steps in ranges):
            ranges = self.replayable  # which takes longer
        for steps in ranges:
            if first in steps and last in steps:
                return max(step for step in self.checkpoints if steps.start - 1 <= step < first)
        what = f"step {first}" if first == last else f"steps {first} to {last}"
        these = ", ".join(f"{steps.start} to {steps.stop - 1}" for steps in ranges)
        raise SlipstreamError(
            f"{what} of {self.folder.root} can't be replayed; of steps {min(self.steps)} to {max(self.steps)}, "
            f"{these or 'none'} can. A replay needs a checkpoint before it ({', '.join(map(str, self.checkpoints))}; "
            "more: learner.checkpoint.keep), and all groups since then (more: buffer.keep_trained)"
        )

    def _ranges(self, available: Set[int]) -> list[range]:
        """The steps, of these, that can be done from a checkpoint on."""
        ranges: list[range] = []
        for checkpoint in self.checkpoints:
            first = end = checkpoint + 1
            while end in available:
                end += 1
            if end > first and not (ranges and first in ranges[-1]):
                ranges.append(range(first, end))
        return ranges

    def _steps_in_files(self) -> Set[int]:
        """Recorded steps whose groups are in files."""
        return self.steps.keys() & set(self._kept.steps())

    def _steps_in_ledger(self) -> Set[int]:
        """Recorded steps whose groups the ledger has; none if it can't be read."""
        stored = set[str]()

        async def read(opened: OpenLedger) -> int:
            for state in STORED:
                stored.update(await opened.reader.ids(state))
            return 0

        with suppress(SlipstreamError):
            with_ledger(str(self.folder.root), read)
        return {step for step, recorded in self.steps.items() if stored.issuperset(recorded.record.groups)}

    def config(self, step: int) -> RunConfig:
        """The settings of a step, with the run's folder where it is now. Raises: ConfigError."""
        config = RunConfig.model_validate(self.steps[step].start.config)
        place = {"dir": self.folder.root.absolute().parent, "name": self.folder.name}
        return config.model_copy(update={"run": config.run.model_copy(update=place)})

    def metrics(self, step: int) -> dict[str, Any]:
        """The record of a step in `metrics.jsonl`; empty if there is none."""
        if not self._metrics:
            self._metrics = {record["step"]: record for record in read_metrics(self.folder).steps}
        return self._metrics.get(step, {})

    def group(self, group_id: str) -> Group:
        """A group. Raises: SlipstreamError when it is not kept, or in no recorded step."""
        for step, recorded in self.steps.items():
            if group_id in recorded.record.groups:
                return self.groups(step)[recorded.record.groups.index(group_id)]
        raise SlipstreamError(f"no recorded step has a group {group_id!r}")

    def groups(self, step: int) -> list[Group]:
        """The groups of a step, in order. Raises: SlipstreamError when one is not kept, or damaged."""
        ids = self.steps[step].record.groups
        blobs = self._kept.read(step) if step in self._kept.steps() else {}
        blobs |= self._from_ledger([group_id for group_id in ids if group_id not in blobs])
        if lost := [group_id for group_id in ids if group_id not in blobs]:
            raise SlipstreamError(
                f"step {step}: {len(lost)} of its {len(ids)} groups are not kept, such as {lost[0]}: see "
                "buffer.keep_trained"
            )
        return [_decoded(group_id, blobs[group_id]) for group_id in ids]

    def fetch(self, steps: Iterable[int]) -> None:
        """Reads groups of steps that are not in files from the ledger: at once, because that takes a while."""
        kept = set(self._kept.steps())
        self._from_ledger([each for step in steps if step not in kept for each in self.steps[step].record.groups])

    def _from_ledger(self, group_ids: Sequence[str]) -> dict[str, bytes]:
        """The bytes of these groups, as far as the ledger has them."""
        missing = [group_id for group_id in group_ids if group_id not in self._blobs]

        async def read(opened: OpenLedger) -> int:
            for first in range(0, len(missing), GROUPS_PER_READ):
                found = await opened.reader.groups(missing[first : first + GROUPS_PER_READ])
                self._blobs.update({record.id: record.blob for record in found if record and record.blob is not None})
            return 0

        if missing:
            with_ledger(str(self.folder.root), read)
        return {group_id: self._blobs[group_id] for group_id in group_ids if group_id in self._blobs}


def _decoded(group_id: str, blob: bytes) -> Group:
    try:
        return decode_group(blob)
    except FrameError as error:
        raise SlipstreamError(f"group {group_id} can't be decoded: {error}") from error
