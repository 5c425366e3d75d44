"""Arguments and results of the ledger's operations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slipstream.buffer.policies.curriculum import Place
from slipstream.buffer.policies.sampling import Order
from slipstream.buffer.wire.messages import LedgerCounts
from slipstream.configs.runtime.errors import SlipstreamError

SPILL_BYTES = 64 << 10
"""Smaller groups stay in Redis: their records take a large part of their memory, and files would hold thousands."""

Number = TypeVar("Number", int, float)
Lengths = Mapping[int, int]
"""Answers by the bucket of their length."""


@dataclass(frozen=True)
class IssuedTask:
    """A granted ticket: its id, and the task as a position in the epoch's order."""

    id: str
    epoch: int
    position: int
    events: int = 0
    """Events that are kept of its episodes."""


@dataclass(frozen=True)
class TicketRequest:
    """A request for tickets for a server."""

    server: str
    version: int
    credits: int
    """Tickets that the server can hold."""
    tickets: int
    """Further tickets, at most."""


@dataclass(frozen=True)
class Room:
    """Room that admission leaves at present."""

    version: int
    """The latest published policy version."""
    allowed: Mapping[int, int]
    """Groups that may be issued, by the version of their server."""
    held: Mapping[str, int]
    """Tickets by server; empty where nothing may be issued."""
    cursor: Place
    """The next task."""


@dataclass(frozen=True)
class Origin:
    """Source of a ticket's tokens, for the account."""

    server: str = ""
    env: str = ""
    """Label of the ticket's env; empty for evaluations."""
    sampled: int = 0
    """Tokens that the server's engine sampled for it, all of them."""


UNKNOWN_ORIGIN = Origin()


@dataclass(frozen=True)
class Facts:
    """Facts of a delivered group that the ledger keeps besides its bytes."""

    tokens: int = 0
    """Action tokens of all its answers."""
    delivered: Lengths = field(default_factory=dict)
    """Lengths of all answers that were finished."""
    kept: Lengths = field(default_factory=dict)
    """Lengths of the answers that may be trained on; one that PF-PPO drew twice counts twice."""
    dropped: Mapping[str, Lengths] = field(default_factory=dict)
    """Lengths of the other answers, by the reason of the drop."""
    missing: int = 0
    """Answers that were not finished in time; their lengths are unknown."""
    kept_tokens: int = 0
    """Action tokens of the answers that may be trained on, each once."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """All other tokens that were sampled for the group, by reason."""
    task: int = 0
    """The task's index."""
    outcome: str | None = None
    """`solved`, `unsolved` or `mixed`; None without a filter or a curriculum that judges it."""

    def script_arguments(self) -> dict[str, Any]:
        """The facts as the Lua scripts take them; absent ones are left out."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class DeliveredGroup:
    """A group as it is stored."""

    id: str
    blob: bytes | memoryview
    oldest_version: int
    newest_version: int
    """Among its action tokens, as the oldest."""
    order: Order
    facts: Facts = field(default_factory=Facts)
    origin: Origin = UNKNOWN_ORIGIN

    def script_arguments(self) -> dict[str, Any]:
        """The group as `deliver.lua` takes it, without its bytes."""
        return self.facts.script_arguments() | {
            "id": self.id,
            "origin": self.origin,
            "oldest": self.oldest_version,
            "newest": self.newest_version,
            "order": self.order.key,
            "raced": self.order.raced,
            "weight": self.order.weight,
        }


@dataclass(frozen=True)
class LeasedGroups:
    """Groups leased for a training step."""

    ids: list[str]
    importance_weights: list[float]
    """Weight of each group in the step: 1, or the importance weight of its draw (`prioritized`)."""
    oldest_version: int
    staleness: list[int]
    """Staleness of tokens of `oldest_version`, of the version after it, and so on to the groups' newest."""

    @property
    def staleness_of(self) -> dict[int, int]:
        """Staleness of the groups' tokens by their policy version."""
        return dict(enumerate(self.staleness, self.oldest_version))


class SpilledGroupsError(SlipstreamError):
    """The next groups to lease have their bytes in spill files, from which they must be read back first."""

    def __init__(self, ids: list[str]) -> None:
        self.ids = ids
        super().__init__(f"the bytes of {len(ids)} groups are in spill files")


class NotCurrentLearnerError(SlipstreamError):
    """A request of a learner that is not the run's current one."""


class SupersededError(NotCurrentLearnerError):
    """Another learner has taken over the run."""

    def __init__(self, run: str) -> None:
        super().__init__(f"another learner has taken over run {run!r}, and at most one trains it")


class UnknownLearnerError(NotCurrentLearnerError):
    """The ledger has no hello of this learner, or Redis has lost it."""

    def __init__(self, run: str) -> None:
        super().__init__(f"the ledger of run {run!r} does not contain this learner")


@dataclass(frozen=True)
class LedgerSnapshot:
    """Counts and latest versions of a run."""

    counts: LedgerCounts
    version: int
    """The latest published policy version."""
    tasks: Mapping[str, int]
    """Tasks by the outcome of their latest group, where a filter or a curriculum judged it."""
    evaluated: list[int]
    """Versions whose evaluations finished last, in that order."""
    evaluating: int | None
    """The version whose evaluation was requested last."""
    slices_left: int
    """Slices of its held-out tasks that are not granted."""


@dataclass(frozen=True)
class SweepResult:
    """Tickets, leased groups and evaluation slices returned by a sweep, and the servers removed as silent."""

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
    """Groups per training step, as far as the ledger remembers."""

    forgotten_step: int
    """The last step of which groups were forgotten; -1: none."""
    groups: Mapping[int, int]
    """Groups of each step."""


@dataclass(frozen=True)
class StepCheck:
    """Result of `check_steps`."""

    problems: list[str]
    """One sentence each, at most MOST_PROBLEMS."""
    forgotten_step: int
    """Steps up to this one could not be checked, because some of their groups were forgotten; -1: all were checked."""


def check_steps(tally: StepTally, *, groups_per_step: int) -> StepCheck:
    """Checks that every step used `groups_per_step` groups, from the first that is fully remembered."""
    problems: list[str] = []
    for step in range(tally.forgotten_step + 1, max(tally.groups, default=-1) + 1):
        trained = tally.groups.get(step, 0)
        if len(problems) == MOST_PROBLEMS:
            break
        if trained != groups_per_step:
            problems.append(
                f"step {step} was trained on {trained} groups, but learner.groups_per_step={groups_per_step}"
            )
    return StepCheck(problems, tally.forgotten_step)


def of_kind(kind: str, counters: Mapping[str, Number]) -> dict[str, Number]:
    """The counters `<kind>:<name>` that are not zero, by name."""
    return {name.removeprefix(f"{kind}:"): n for name, n in counters.items() if n and name.startswith(f"{kind}:")}
