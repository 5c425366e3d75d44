"""Samples of what the policy generated: a few trajectories of each step and evaluation, kept in the run folder."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np

from slipstream.buffer.wire.codec import action_mask, token_ids
from slipstream.buffer.wire.messages import Trajectory
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.metrics.destinations import Row
from slipstream.learner.metrics.trackers import Tracker
from slipstream.models.folder import Decode, text_decoder

log = get_log("learner.samples")

Kind = Literal["step", "eval"]
MOST_FILES: Final = 256
"""Beyond that, every other file of the older half is removed: the whole run stays represented, its end densely."""
MOST_TOKENS: Final = 1 << 16
"""Most tokens of the trajectories in one file, 9 bytes each."""


class Sample(msgspec.Struct, frozen=True):
    """One kept trajectory.

    Attributes:
        kind: `step` (trained on) or `eval`.
        number: the training step, or the evaluated policy version.
        chosen: why it was kept: `best`, `worst`, `longest` or `random`.
    """

    kind: Kind
    number: int
    chosen: str
    trajectory: Trajectory


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[Sample])


class SampleStore:
    """Writes samples into a folder. A failure to write is logged once, and costs the samples only."""

    def __init__(self, folder: Path, *, trackers: Sequence[Tracker] = (), model: Path | None = None) -> None:
        """
        Args:
            trackers: get the samples too, as text.
            model: folder with the tokenizer for that; None: they get none.
        """
        self._folder = folder
        self._model = model
        self._trackers = trackers
        self._is_broken = False

    def keep(self, kind: Kind, number: int, trajectories: Sequence[Trajectory]) -> None:
        """Keeps a few of a step's, or an evaluation's, trajectories."""
        chosen = choose(trajectories, seed=number)
        samples = [Sample(kind, number, why, trajectories[index]) for why, index in chosen.items()]
        if not samples:
            return
        if (model := self._model) is not None:
            for tracker in self._trackers:
                tracker.add_rows(f"samples/{kind}", lambda: [_row(sample, text_decoder(model)) for sample in samples])
        if self._is_broken:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            write_atomically(self._folder / f"{kind}-{number:09d}.msgpack", [_encoder.encode(samples)])
            self._thin(kind)
        except OSError as error:
            self._is_broken = True
            log.warning("samples are no longer kept", folder=str(self._folder), error=str(error))

    def _thin(self, kind: Kind) -> None:
        files = sorted(self._folder.glob(f"{kind}-*.msgpack"))
        if len(files) > MOST_FILES:
            for file in files[1 : len(files) // 2 : 2]:
                file.unlink(missing_ok=True)


def _row(sample: Sample, decode: Decode) -> Row:
    """A sample as a row of a table."""
    trajectory = sample.trajectory
    ids, start = token_ids(trajectory), int(np.argmax(action_mask(trajectory)))
    return {
        "number": float(sample.number),
        "chosen": sample.chosen,
        "reward": trajectory.reward,
        "finish_reason": trajectory.finish_reason,
        "prompt": decode(ids[:start].tolist()),
        "answer": decode(ids[start:].tolist()),
    }


def choose(trajectories: Sequence[Trajectory], *, seed: int) -> dict[str, int]:
    """Index of the best, the worst, the longest and a random trajectory; each once, within `MOST_TOKENS` in all."""
    indices = range(len(trajectories))
    if not indices:
        return {}
    wanted = {
        "best": max(indices, key=lambda index: trajectories[index].reward),
        "worst": min(indices, key=lambda index: trajectories[index].reward),
        "longest": max(indices, key=lambda index: int(np.count_nonzero(action_mask(trajectories[index])))),
        "random": random.Random(seed).choice(indices),
    }
    chosen: dict[str, int] = {}
    tokens = 0
    for why, index in wanted.items():
        size = len(trajectories[index].action_mask)
        if index not in chosen.values() and tokens + size <= MOST_TOKENS:
            chosen[why] = index
            tokens += size
    return chosen


def read_samples(folder: Path, kind: Kind) -> list[Sample]:
    """All kept samples of a kind, oldest first; files that another release wrote are left out."""
    return [sample for file in sorted(folder.glob(f"{kind}-*.msgpack")) for sample in read_file(file)]


def read_file(path: Path) -> list[Sample]:
    """The samples of a file; none where it is missing or of another release."""
    try:
        return _decoder.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return []
