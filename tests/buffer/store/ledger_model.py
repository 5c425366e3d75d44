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
class Branch:
    """Versions from `first` on; those deeper than `shared` were not published again."""

    first: int
    depth: int
    shared: int = 1 << 30


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
    holder: dict[str, str] = field(default_factory=dict)
    """Server by ticket."""
    broken_tokens: int = 0
    """Tokens of failed tickets."""
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
    branches: list[Branch] = field(default_factory=lambda: [Branch(0, 0)])
    version_after: dict[int, int] = field(default_factory=dict)
    """The latest version by the number of steps done."""
    resumed_depth: int | None = None
    """Of the weights that a restarted learner has, until it publishes or trains them."""
    undone: dict[int, list[str]] = field(default_factory=dict)
    """Groups of the steps to repeat."""
    repeat_until: int = 0

    def depth(self, version: int) -> int:
        branch = [branch for branch in self.branches if branch.first <= version][-1]
        depth = branch.depth + version - branch.first
        return depth if depth <= branch.shared else 2 * branch.shared - depth

    def publish(self) -> None:
        self.version += 1
        self.consumed = 0
        if self.resumed_depth is not None and self.resumed_depth != self.depth(self.version):
            self.branches.append(Branch(self.version, self.resumed_depth))
        self.resumed_depth = None
        self.version_after[self.next_step] = self.version

    def restart(self, done: int) -> int:
        """Undoes the steps from `done` on; returns the version of the weights before them."""
        version = self.version_after.get(done, 0)
        self.resumed_depth = self.depth(version)
        self.repeat_until = max(self.next_step, self.repeat_until)
        for step in range(done, self.next_step):
            self.undone[step] = sorted((id for id, steps in self.uses.items() if step in steps), key=int)
        for steps in self.uses.values():
            steps[:] = [step for step in steps if step < done]
        return version

    def expire_stale(self, consuming_version: int) -> None:
        oldest = self.depth(consuming_version) - MAX_STALENESS
        for id in [id for id in self.ready if self.depth(self.oldest[id]) < oldest]:
            self.ready.remove(id)
            if self.uses.get(id):
                self.trained.add(id)
            else:
                self.expired += 1

    def next_groups(self, step: int, consuming_version: int) -> list[str]:
        """Groups of the next lease: those of the step when it was undone, or the oldest ones."""
        self.expire_stale(consuming_version)
        if step < self.repeat_until:
            again, held = self.undone.get(step, []), self.held()
            if len(again) == PER_STEP and all(id in self.ready or id in held for id in again):
                return [] if set(again) & set(held) else again
            self.undone.clear()
            self.repeat_until = 0
            for branch in self.branches[:-1]:
                branch.shared = min(branch.shared, self.depth(consuming_version))
            self.expire_stale(consuming_version)
        fresh = sorted(self.ready, key=int)[:PER_STEP]
        return fresh if len(fresh) == PER_STEP else []

    def held(self) -> list[str]:
        return [id for lease in self.leased.values() if not lease.lapsed for id in lease.ids]

    def capacity(self, server_version: int) -> int:
        if self.resumed_depth is not None and self.resumed_depth < self.depth(self.version):
            return 0
        stored = [*self.ready, *self.held()]
        pipeline = len(self.in_flight) + len(stored)
        uses = max(1, min(self.max_uses, (MAX_STALENESS + 1) * PER_VERSION // PER_STEP))
        used = sum(len(self.uses.get(id, ())) for id in stored)
        behind = max(0, self.depth(self.version) - self.depth(server_version))
        left = (MAX_STALENESS + 1 - behind) * PER_VERSION - self.consumed
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
