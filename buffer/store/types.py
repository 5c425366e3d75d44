"""What goes into the ledger, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.buffer.policies.sampling import Order
from slipstream.buffer.wire.messages import LedgerCounts
from slipstream.configs.runtime.errors import SlipstreamError

Lengths = Mapping[int, int]
"""Answers by the bucket of their length."""


@dataclass(frozen=True)
class IssuedTask:
    """A granted ticket: its id, and the task as a position in the epoch's order."""

    id: str
    epoch: int
    position: int


@dataclass(frozen=True)
class Issued:
    """What a server was granted."""

    tasks: list[IssuedTask]
    free: int
    """Credits that it has left: more than 0 means that the run allows no more at present."""


@dataclass(frozen=True)
class Facts:
    """What the ledger keeps of a group that has arrived, besides its bytes."""

    tokens: int = 0
    """Action tokens of all its answers."""
    delivered: Lengths = field(default_factory=dict)
    """Of all answers."""
    kept: Lengths = field(default_factory=dict)
    """Of the answers that may be trained on; one that filtration drew twice counts twice."""
    dropped: Mapping[str, Lengths] = field(default_factory=dict)
    """Of the others, by reason."""
    missing: int = 0
    """Answers that were not finished in time: of unknown length."""
    task: int = 0
    """The task's index."""
    outcome: str | None = None
    """`solved`, `unsolved` or `mixed`, if a filter found out."""


@dataclass(frozen=True)
class DeliveredGroup:
    """A group as it is stored."""

    id: str
    blob: bytes | memoryview
    oldest_version: int
    """Among its action tokens."""
    order: Order
    facts: Facts = field(default_factory=Facts)


@dataclass(frozen=True)
class Lease:
    """Groups leased for a training step."""

    ids: list[str]
    importance_weights: list[float]
    """How much each of them counts in the step."""


class NotCurrentLearnerError(SlipstreamError):
    """A learner asked for what only the run's present one may have."""


class SupersededError(NotCurrentLearnerError):
    """Another learner has said hello since."""

    def __init__(self, run: str) -> None:
        super().__init__(f"another learner has taken over run {run!r}, and at most one trains it")


class UnknownLearnerError(NotCurrentLearnerError):
    """The ledger has not heard its hello, or Redis has lost it since."""

    def __init__(self, run: str) -> None:
        super().__init__(f"the ledger of run {run!r} has not heard of this learner")


@dataclass(frozen=True)
class LedgerSnapshot:
    """How a run stands."""

    counts: LedgerCounts
    version: int
    """The latest published policy version."""
    tasks: Mapping[str, int]
    """Tasks by the outcome of their latest group, where a filter found it out."""
    evaluated: list[int]
    """Versions whose evaluations finished last, in that order."""
    evaluating: int | None
    """The version whose evaluation was asked for last."""
    slices_left: int
    """Of its held-out tasks: slices that came back, or were not handed out yet."""


@dataclass(frozen=True)
class SweepResult:
    """What a look at the deadlines gave back."""

    tickets: int
    leases: int
    slices: int
    silent: list[str]


@dataclass(frozen=True)
class EvalSlice:
    """Held-out tasks [first, first + tasks) to be answered under ticket `id`."""

    id: str
    first: int
    tasks: int


MOST_PROBLEMS = 1000


@dataclass(frozen=True)
class StepTally:
    """What the ledger remembers of the steps."""

    forgotten_step: int
    """The last step of which groups were forgotten, -1 without any."""
    groups: Mapping[int, int]
    """By step."""


@dataclass(frozen=True)
class StepCheck:
    """The steps against `learner.groups_per_step`."""

    problems: list[str]
    """One sentence each, at most MOST_PROBLEMS."""
    forgotten_step: int
    """Steps up to this one could not be checked, since groups of theirs were forgotten; -1: all were."""


def check_steps(tally: StepTally, *, groups_per_step: int) -> StepCheck:
    """Every step has `groups_per_step` groups, from the first that is wholly remembered to the last."""
    problems: list[str] = []
    for step in range(tally.forgotten_step + 1, max(tally.groups, default=-1) + 1):
        found = tally.groups.get(step, 0)
        if len(problems) == MOST_PROBLEMS:
            break
        if found != groups_per_step:
            problems.append(f"step {step} was trained on {found} groups, but learner.groups_per_step={groups_per_step}")
    return StepCheck(problems, tally.forgotten_step)
