"""What an env is: tasks by index, each with a prompt and what its answer is judged by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

Split = Literal["train", "eval"]

MOST_TASKS: Final = 10**8
"""Of one split. The buffer shuffles the indices of an epoch in its memory: so many take 0.8 GB and several seconds."""

LONGEST_FINGERPRINT: Final = 1024
"""Characters. A rollout server tells it to the buffer, which drops frames with longer names."""


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
    """A family of tasks; the same index always gives the same task.

    A rollout server makes it and asks for its sizes and its fingerprint in its main thread, at the start. From then on
    it asks for tasks, in another thread, always the same, and for one at a time: so an env needs no locks, but what
    belongs to the thread that opens it, such as a connection of sqlite3, is to be opened by the first `task`. Only when
    a call outlasts `rollout.group_deadline_s` it is given up, and the next ones come from yet another thread.
    """

    def size(self, split: Split) -> int:
        """Number of tasks in the split, at most `MOST_TASKS`; `eval` tasks never occur in `train`."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`, 0 <= index < size(split).

        It may block: other tasks wait for it, but no answer, for up to `rollout.group_deadline_s`. It may raise: that
        costs the group, which is dropped and counted (`env_error`).
        """
        ...

    def fingerprint(self) -> str:
        """A text that differs when the tasks differ: every server of a run must announce the same.

        At most `LONGEST_FINGERPRINT` characters.
        """
        ...
