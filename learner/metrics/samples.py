"""Samples of what the policy generated: a few trajectories of each step and evaluation, kept in the run folder."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.buffer.wire.codec import action_mask, token_ids, trajectory_problem
from slipstream.buffer.wire.messages import Group, Trajectory
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
"""Most tokens of the trajectories in one file: 9 bytes each, and 16 more for each action that was trained on."""
_MIXTURE_SCORE: Final = "mix/"
"""Prefix of the score that names the env of a task, where the env is a mixture."""


@dataclass(frozen=True)
class Source:
    """Origin of a trajectory."""

    group_id: str
    task: int | None
    """Index of the task in the env; None: unknown."""


def sources_of(group: Group, *, samples: int) -> list[Source]:
    """Sources of a group's trajectories.

    Args:
        samples: answers per task of an evaluation. Without all of its answers it is not known which task has which.
    """
    if len(group.indices) == 1:
        return [Source(group.id, group.indices[0])] * len(group.trajectories)
    tasks = [None if group.missing else group.indices[each.episode // samples] for each in group.trajectories]
    return [Source(group.id, task) for task in tasks]


class ActionColumns(msgspec.Struct, frozen=True):
    """Values of a trajectory's actions in the update that trained on them: float32, one element per action."""

    ratio: bytes
    """π_θ/μ before the update, for every loss: neither capped nor clipped, within exp(±20). It is the product of the
    trust region's ratio π_θ/π_prox and of the correction's weight π_prox/μ."""
    advantage: bytes
    trained: bytes
    """1 where the action is in the loss, 0 where the correction rejected it."""
    entropy: bytes
    """Of the distribution from which the action was drawn, in nats."""


class Sample(msgspec.Struct, frozen=True):
    """One kept trajectory.

    Attributes:
        kind: `step` (trained on) or `eval`.
        number: the training step, or the evaluated policy version.
        chosen: why it was kept: `best`, `worst`, `longest` or `random`.
        group_id: empty in files of earlier releases, which lack all that follows.
        answer: index of its episode in the group; the trajectories of one episode share it.
        task: index of the task in the env; None: unknown.
        env: the env's name, in a mixture the label of the task's env.
        actions: None for evaluations.
    """

    kind: Kind
    number: int
    chosen: str
    trajectory: Trajectory
    group_id: str = ""
    answer: int | None = None
    task: int | None = None
    env: str = ""
    actions: ActionColumns | None = None

    @property
    def ratio(self) -> NDArray[np.float32] | None:
        """π_θ/μ of each token, NaN where it is no action or was not trained on; None: not kept."""
        return None if self.actions is None else self._of_tokens(self.actions.ratio)

    @property
    def advantage(self) -> NDArray[np.float32] | None:
        """Advantage of each token, NaN where it is no action; None: not kept."""
        return None if self.actions is None else self._of_tokens(self.actions.advantage)

    @property
    def trained(self) -> NDArray[np.bool_] | None:
        """True at each token that is in the loss; None: not kept."""
        return None if self.actions is None else self._of_tokens(self.actions.trained) > 0

    @property
    def entropy(self) -> NDArray[np.float32] | None:
        """Entropy of the policy at each token, NaN where it is no action or was not trained on; None: not kept."""
        return None if self.actions is None else self._of_tokens(self.actions.entropy)

    def _of_tokens(self, column: bytes) -> NDArray[np.float32]:
        """A value for each token, from one for each action."""
        is_action = action_mask(self.trajectory).astype(bool)
        is_action[:1] = False  # nothing predicts the first token
        values = np.full(len(is_action), np.nan, dtype=np.float32)
        values[is_action] = np.frombuffer(column, dtype="<f4")
        return values


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[Sample])


class SampleStore:
    """Writes samples into a folder. A failure to write is logged once, and costs the samples only."""

    def __init__(
        self, folder: Path, *, env: str = "", trackers: Sequence[Tracker] = (), model: Path | None = None
    ) -> None:
        """
        Args:
            env: name of the run's env.
            trackers: get the samples too, as text.
            model: folder with the tokenizer for that; None: they get none.
        """
        self._folder = folder
        self._env = env
        self._model = model
        self._trackers = trackers
        self._is_broken = False
        self._files: dict[Kind, int] = {}
        """Number of files, once it is known."""

    def keep(
        self,
        kind: Kind,
        number: int,
        trajectories: Sequence[Trajectory],
        sources: Sequence[Source | None] = (),
        *,
        chosen: Mapping[str, int] | None = None,
        actions: Mapping[int, ActionColumns] | None = None,
    ) -> None:
        """Keeps a few of a step's, or an evaluation's, trajectories.

        Args:
            sources: of the trajectories; empty: unknown.
            chosen: those to keep, as `choose` returns them; None: it chooses now.
            actions: values of their actions, by the trajectory's index.
        """
        actions = actions or {}
        samples = [
            self._sample(
                kind, number, why, trajectories[index], sources[index] if sources else None, actions.get(index)
            )
            for why, index in (choose(trajectories, seed=number) if chosen is None else chosen).items()
        ]
        if not samples:
            return
        if (model := self._model) is not None:
            for tracker in self._trackers:
                tracker.add_rows(f"samples/{kind}", lambda: [_row(sample, text_decoder(model)) for sample in samples])
        if self._is_broken:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            file = self._folder / f"{kind}-{number:09d}.msgpack"
            write_atomically(file, [_encoder.encode(samples)], durable=False)
            self._thin(kind)
        except OSError as error:
            self._is_broken = True
            log.warning("samples are no longer kept", folder=str(self._folder), error=str(error))

    def _sample(
        self,
        kind: Kind,
        number: int,
        chosen: str,
        trajectory: Trajectory,
        source: Source | None,
        actions: ActionColumns | None,
    ) -> Sample:
        if source is None:
            return Sample(kind, number, chosen, trajectory)
        labels = [name.removeprefix(_MIXTURE_SCORE) for name in trajectory.scores if name.startswith(_MIXTURE_SCORE)]
        return Sample(
            kind,
            number,
            chosen,
            trajectory,
            group_id=source.group_id,
            answer=trajectory.episode,
            task=source.task,
            env=labels[0] if labels else self._env,
            actions=actions,
        )

    def _thin(self, kind: Kind) -> None:
        if kind in self._files and self._files[kind] < MOST_FILES:  # a listing takes as long as writing a file
            self._files[kind] += 1
            return
        files = sorted(self._folder.glob(f"{kind}-*.msgpack"))
        removed = files[1 : len(files) // 2 : 2] if len(files) > MOST_FILES else []
        for file in removed:
            file.unlink(missing_ok=True)
        self._files[kind] = len(files) - len(removed)


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
    """The samples of a file, without damaged ones; none where it is missing or of another release."""
    try:
        samples = _decoder.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return []
    return [sample for sample in samples if _is_whole(sample)]


def _is_whole(sample: Sample) -> bool:
    """True if the arrays of a sample fit each other."""
    if trajectory_problem(sample.trajectory) or not sample.trajectory.action_mask:
        return False
    size = 4 * int(np.count_nonzero(action_mask(sample.trajectory)[1:]))
    return sample.actions is None or all(len(column) == size for column in msgspec.structs.astuple(sample.actions))
