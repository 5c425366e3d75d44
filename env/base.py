"""What an env is: tasks by index, each with a prompt and what its answer is judged by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

Split = Literal["train", "eval"]

MOST_TASKS: Final = 10**8
"""Of one split. The buffer shuffles the indices of an epoch in its memory: so many take 0.8 GB and several seconds."""


@dataclass(frozen=True)
class Task:
    """One problem.

    Attributes:
        prompt: text that is tokenized as it is, or chat messages (`role`, `content`) for the model's
            chat template.
        reference: what rewards compare an answer with.
        info: anything else a reward needs; plain JSON values, because rewards run in other processes.
    """

    prompt: str | Sequence[Mapping[str, str]]
    reference: str
    info: Mapping[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """A family of tasks; the same index always gives the same task."""

    def size(self, split: Split) -> int:
        """Number of tasks in the split, at most `MOST_TASKS`; `eval` tasks never occur in `train`."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`, 0 <= index < size(split)."""
        ...

    def fingerprint(self) -> str:
        """A text that differs when the tasks differ: every server of a run must announce the same."""
        ...
