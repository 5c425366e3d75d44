"""The groups that an earlier run has kept in its folder, as rows."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.buffer.store.kept import KeptGroups, KeptGroupsError
from slipstream.buffer.wire.codec import FrameError, decode_group
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.data.preferences import GROUP, best_and_worst

log = get_log("learner.rows")


class RecordedGroups:
    """The groups of a run's folder (`buffer.keep_trained`) as rows `{"group": Group}`; encoded in memory.

    In the order in which they were first trained on, each once.
    """

    def __init__(self, run: Path, *, pairs: bool) -> None:
        """Reads the groups; what can't be read is left out, counted and logged.

        Args:
            run: the run's folder.
            pairs: only groups that `best_and_worst` finds a pair in.

        Raises: ConfigError when there is none.
        """
        self._run = run
        self._frames: dict[str, bytes] = {}
        left_out = Counter[str]()
        kept = KeptGroups(RunPaths(run).kept_groups)
        for step in kept.steps():
            try:
                frames = kept.read(step)
            except KeptGroupsError as error:
                log.warning("groups of a step left out", reason=str(error))
                left_out["damaged steps"] += 1
                continue
            for group_id, frame in frames.items():
                if group_id in self._frames:
                    continue
                problem = _problem(frame, pairs=pairs)
                if problem is None:
                    self._frames[group_id] = frame
                else:
                    left_out[problem] += 1
        self._ids = list(self._frames)
        log.info("groups of a run read", run=str(run), groups=len(self._ids), left_out=dict(left_out))
        if not self._ids:
            counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            raise ConfigError(
                f"{kept.root} has no {'pair of a better and a worse answer' if pairs else 'groups'}"
                f"{f' (left out: {counts})' if counts else ''}: name the folder of a run of trainer rl that has kept "
                "groups with different rewards (buffer.keep_trained)"
            )

    def __len__(self) -> int:
        """Number of groups."""
        return len(self._ids)

    def place(self, index: int) -> str:
        """Run and id of the group."""
        return f"{self._run}: group {self._ids[index]}"

    def row(self, index: int) -> dict[str, Any]:
        """A group."""
        return {GROUP: decode_group(self._frames[self._ids[index]])}

    def scan(self) -> Iterator[dict[str, Any]]:
        """All groups, in order."""
        return map(self.row, range(len(self)))


def _problem(frame: bytes, *, pairs: bool) -> str | None:
    """The reason why a group is left out; None if it is not."""
    try:
        group = decode_group(frame)
    except FrameError as error:
        log.warning("group left out", reason=str(error))
        return "unreadable groups"
    return "groups without spread" if pairs and best_and_worst(group) is None else None
