"""Groups that were left out of a replay: their effect as a table, and their answers as text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from slipstream.buffer.wire.codec import action_mask
from slipstream.buffer.wire.messages import LOGPROB_DTYPE, Group, Trajectory
from slipstream.tools.cli import printable, table_console
from slipstream.tools.follow import MISSING
from slipstream.tools.rewind.recording import Recording
from slipstream.tools.transcript import decoder_or_reason, text_of

MIN_COLUMNS = 120
SHOWN_ANSWERS: Final = 2


@dataclass(frozen=True)
class Suspect:
    """A group, or some of its answers, without which steps were replayed.

    Attributes:
        answers: indices of the answers that were left out; empty: all.
        effect: share of the way back to the metric's usual value without them.
        staleness: of tokens, by their policy version.
        ratio: mean π_θ/μ of the group's actions in its step; NaN where it is not known.
    """

    group_id: str
    step: int
    answers: tuple[int, ...]
    effect: float
    group: Group
    staleness: Mapping[int, int]
    ratio: float = math.nan

    @property
    def size(self) -> int:
        """Number of the group's answers."""
        return len(self.group.trajectories)

    @property
    def left_out(self) -> list[tuple[int, Trajectory]]:
        """The answers that were left out, with their indices."""
        trajectories = self.group.trajectories
        return [(index, trajectories[index]) for index in self.answers or range(len(trajectories))]


def print_suspects(recording: Recording, suspects: Sequence[Suspect], controls: Sequence[Suspect]) -> None:
    """Prints a table of all, and the answers of the suspects: of each, those with the least and the largest reward."""
    if not suspects and not controls:
        return
    table = Table(border_style="cyan")
    for name in ("group", "step", "way back", "answers", "reward", "log μ", "mean π/μ", "versions", "staleness"):
        table.add_column(name, justify="right", no_wrap=name == "group")
    for suspect in (*suspects, *controls):
        of = [trajectory for _, trajectory in suspect.left_out]
        chosen = ", ".join(map(str, suspect.answers)) if suspect.answers else f"all {suspect.size}"
        versions = sorted({span.version for trajectory in of for span in trajectory.spans})
        table.add_row(
            Text(printable(suspect.group_id)), str(suspect.step), f"{suspect.effect:.0%}", chosen,
            _range([trajectory.reward for trajectory in of]), _range(_logprobs(of).tolist()),
            MISSING if math.isnan(suspect.ratio) else f"{suspect.ratio:.3g}",
            _range(versions), _range([suspect.staleness[version] for version in versions]),
        )  # fmt: skip
    table_console(min_width=MIN_COLUMNS).print(table)
    decode, reason = decoder_or_reason(recording.folder, recording.config(min(recording.steps)).model)
    if decode is None:
        print(f"texts not shown: {reason}")
        return
    for suspect in suspects:
        ordered = sorted(suspect.left_out, key=lambda one: one[1].reward)
        for index, trajectory in ordered if len(ordered) <= SHOWN_ANSWERS else (ordered[0], ordered[-1]):
            logprobs = _range(_logprobs([trajectory]).tolist())
            name = printable(suspect.group_id)
            print(f"\n=== group {name}, answer {index}: reward {trajectory.reward:.4g}, log μ {logprobs}")
            print(text_of(trajectory, decode))
        print()


def suspect_json(suspect: Suspect) -> dict[str, Any]:
    """A suspect as JSON; its answers one by one."""
    return {
        "group": suspect.group_id,
        "step": suspect.step,
        "effect": suspect.effect,
        "ratio": suspect.ratio if math.isfinite(suspect.ratio) else None,
        "answers": [
            {
                "answer": index,
                "reward": trajectory.reward,
                "logprob_min": float(_logprobs([trajectory]).min()),
                "versions": sorted({span.version for span in trajectory.spans}),
                "staleness": max(suspect.staleness[span.version] for span in trajectory.spans),
                "finish_reason": trajectory.finish_reason,
            }
            for index, trajectory in suspect.left_out
        ],
    }


def _logprobs(trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
    """log μ of all actions."""
    return np.concatenate(
        [
            np.frombuffer(trajectory.behaviour_logprobs, dtype=LOGPROB_DTYPE)[action_mask(trajectory) != 0]
            for trajectory in trajectories
        ]
    )


def _range(values: Sequence[float]) -> str:
    least, most = min(values), max(values)
    return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
