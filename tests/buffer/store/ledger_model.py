"""A model of the ledger in Python: the reference for `test_ledger_interleavings`."""

from dataclasses import dataclass, field

MAX_STALENESS = 1
PER_VERSION = 2
PER_STEP = 2

Task = tuple[int, int]


@dataclass
class Ticket:
    """A ticket in flight."""

    task: Task
    server: str
    version: int
    deadline_s: float
    """Seconds left; passed if not positive."""


@dataclass
class Lease:
    """Groups leased for one step; `lapsed` after its deadline was applied."""

    ids: list[str]
    deadline_s: float
    lapsed: bool = False


@dataclass
class Model:
    """The expected content of the ledger."""

    max_uses: int
    version: int = 0
    consumed: int = 0
    issued: int = 0
    filtered: int = 0
    expired: int = 0
    reissued: int = 0
    cursor: int = 0
    skipped: int = 0
    """Tasks that the cursor moved past."""
    in_flight: dict[str, Ticket] = field(default_factory=dict)
    late: dict[str, str] = field(default_factory=dict)
    """Server by expired ticket that it may still work on."""
    reissue: list[Task] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)
    leased: dict[int, Lease] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    durable: set[str] = field(default_factory=set)
    oldest: dict[str, int] = field(default_factory=dict)
    """Oldest version by delivered group."""
    uses: dict[str, list[int]] = field(default_factory=dict)
    """Steps that each of these was used in."""
    failed: set[str] = field(default_factory=set)
    next_step: int = 0
    """The first step that is not trained."""
    checkpoint: int = 0

    def held(self) -> list[str]:
        return [id for lease in self.leased.values() if not lease.lapsed for id in lease.ids]

    def capacity(self, server_version: int) -> int:
        stored = [*self.ready, *self.held()]
        pipeline = len(self.in_flight) + len(stored)
        uses = max(1, min(self.max_uses, (MAX_STALENESS + 1) * PER_VERSION // PER_STEP))
        used = sum(len(self.uses.get(id, ())) for id in stored)
        left = (MAX_STALENESS + 1 + server_version - self.version) * PER_VERSION - self.consumed
        allowed = (left - max(pipeline, uses * pipeline - used)) // uses
        return max(allowed, PER_STEP - pipeline) if left > 0 else allowed

    def reissue_ticket(self, id: str) -> None:
        self.reissue.append(self.in_flight.pop(id).task)
        self.reissued += 1

    def take_back(self, server: str) -> int:
        lost = [id for id, ticket in self.in_flight.items() if ticket.server == server]
        for id in lost:
            self.reissue_ticket(id)
        self.late = {id: holder for id, holder in self.late.items() if holder != server}
        return len(lost)

    def charged(self, server: str) -> list[str]:
        """Tickets that a server may work on."""
        mine = [id for id, ticket in self.in_flight.items() if ticket.server == server]
        return sorted([*mine, *(id for id, holder in self.late.items() if holder == server)], key=int)
