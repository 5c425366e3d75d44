"""The ledger under random interleavings of everything that servers, learner and deadlines can do to it.

A model in plain Python says after every operation what the ledger must hold; the ledger is the real one.
"""

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redis.asyncio import Redis

from slipstream.buffer.keys import group_key, run_prefix
from slipstream.buffer.store import DeliveredGroup, RedisStore
from tests.buffer.ledger import AT_ONCE_S, LATER_S, TRAIN_TASKS, issue, lease

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
    doomed: bool


@dataclass
class Lease:
    """What the learner holds for one step; `lapsed` once its deadline was applied."""

    ids: list[str]
    doomed: bool
    lapsed: bool = False


@dataclass
class Model:
    """What the ledger must hold."""

    version: int = 0
    consumed: int = 0
    issued: int = 0
    filtered: int = 0
    expired: int = 0
    reissued: int = 0
    cursor: int = 0
    in_flight: dict[str, Ticket] = field(default_factory=dict)
    reissue: list[Task] = field(default_factory=list)
    ready: dict[str, int] = field(default_factory=dict)
    leased: dict[int, Lease] = field(default_factory=dict)
    trained: dict[str, int] = field(default_factory=dict)
    durable: set[str] = field(default_factory=set)
    oldest: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    next_step: int = 0
    """The first step that is not trained."""
    checkpoint: int = 0

    def held(self) -> list[str]:
        return [id for lease in self.leased.values() if not lease.lapsed for id in lease.ids]

    def capacity(self, server_version: int) -> int:
        pipeline = len(self.in_flight) + len(self.ready) + len(self.held())
        return (MAX_STALENESS + 1 + server_version - self.version) * PER_VERSION - self.consumed - pipeline

    def back_to_ready(self, ids: list[str]) -> None:
        for id in ids:
            self.ready[id] = self.oldest[id]


class Interleavings(RuleBasedStateMachine):
    """Issue, deliver, fail, lease, train, publish, checkpoint, deadlines and restarts, in any order."""

    redis_url: str
    run_name: str
    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.run = f"{self.run_name}-{next(self.numbers)}"
        self.redis = Redis.from_url(self.redis_url)
        self.store = RedisStore(self.redis, self.run)
        self.model = Model()

    def teardown(self) -> None:
        self.runner.run(self._finish())
        self.runner.close()

    # --- servers -------------------------------------------------------------------------------------------------

    @rule(server=st.sampled_from("ab"), credits=st.integers(1, 5), lag=st.integers(0, 2), doomed=st.booleans())
    def ask_for_tickets(self, server: str, credits: int, lag: int, doomed: bool) -> None:
        model = self.model
        version = max(0, model.version - lag)
        running = sum(ticket.server == server for ticket in model.in_flight.values())
        expected = max(0, min(model.capacity(version), credits - running))
        granted = self.runner.run(
            issue(
                self.store, credits, server=server, server_version=version, max_staleness=MAX_STALENESS,
                groups_per_version=PER_VERSION, deadline_s=AT_ONCE_S if doomed else LATER_S,
            )
        )  # fmt: skip
        assert len(granted) == expected
        for task in granted:
            if model.reissue:
                model.reissue.remove((task.epoch, task.position))
            else:
                assert (task.epoch, task.position) == divmod(model.cursor, TRAIN_TASKS)
                model.cursor += 1
            model.issued += 1
            assert task.id == str(model.issued)
            model.in_flight[task.id] = Ticket((task.epoch, task.position), server, version, doomed)

    @precondition(lambda self: self.model.in_flight)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.model.in_flight, key=int)))
        ticket = self.model.in_flight.pop(id)
        oldest = data.draw(st.integers(ticket.version, self.model.version))
        assert self._deliver(id, oldest) == "ready"
        self.model.ready[id] = self.model.oldest[id] = oldest

    @precondition(lambda self: self.model.issued)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        model = self.model
        known = [id for id in map(str, range(1, model.issued + 1)) if id not in model.in_flight]
        if not known:
            return
        id = data.draw(st.sampled_from(known))
        present = id in model.ready or id in model.held() or id in model.trained or id in model.durable
        outcome = self._deliver(id, 0)
        assert outcome == "duplicate" if present else outcome in {"void", "duplicate"}

    @precondition(lambda self: self.model.in_flight)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.model.in_flight, key=int)))
        assert self.runner.run(self.store.fail(id, reason="broken", tokens=2)) == "filtered"
        assert self.runner.run(self.store.fail(id, reason="broken", tokens=2)) == "void"
        del self.model.in_flight[id]
        self.model.gone.add(id)
        self.model.filtered += 1

    # --- learner -------------------------------------------------------------------------------------------------

    @rule(ahead=st.integers(0, 1), doomed=st.booleans())
    def lease(self, ahead: int, doomed: bool) -> None:
        """Asks for the next step that it does not hold: one is trained on while the next is fetched."""
        model = self.model
        step = model.next_step + len(model.leased)
        if len(model.leased) >= 2 or any(lease.lapsed for lease in model.leased.values()):
            return
        consuming_version = model.version + ahead
        fresh: list[str] = []
        for id in sorted(model.ready, key=int):
            if len(fresh) < PER_STEP and model.ready[id] < consuming_version - MAX_STALENESS:
                del model.ready[id]
                model.gone.add(id)
                model.expired += 1
            elif len(fresh) < PER_STEP:
                fresh.append(id)
        got = self._lease(step, consuming_version, doomed=doomed)
        assert got == (fresh if len(fresh) == PER_STEP else [])
        assert all(model.oldest[id] >= consuming_version - MAX_STALENESS for id in got), "leased although too stale"
        if got:
            for id in got:
                del model.ready[id]
            model.leased[step] = Lease(got, doomed)

    @rule()
    def ask_again_for_the_same_lease(self) -> None:
        for step, held in self.model.leased.items():
            if not held.lapsed:
                assert self._lease(step, self.model.version, doomed=False) == held.ids

    @precondition(lambda self: self.model.next_step in self.model.leased)
    @rule()
    def train(self) -> None:
        """Also when the lease ran out meanwhile: the learner can't know."""
        model = self.model
        ids = model.leased.pop(model.next_step).ids
        assert not set(ids) & (model.trained.keys() | model.durable), "trained twice"
        assert self.runner.run(self.store.train(model.next_step)) == len(ids)
        for id in ids:
            model.ready.pop(id, None)
            model.trained[id] = model.next_step
        model.consumed += len(ids)
        model.next_step += 1

    @rule()
    def publish(self) -> None:
        self.model.version += 1
        self.model.consumed = 0
        self.runner.run(self.store.publish(self.model.version, eval_tasks=0))

    @rule()
    def save_a_checkpoint(self) -> None:
        model = self.model
        model.checkpoint = model.next_step
        assert self.runner.run(self.store.durable(model.checkpoint)) == len(model.trained)
        model.durable |= model.trained.keys()
        model.trained.clear()

    @rule()
    def restart_the_learner(self) -> None:
        model = self.model
        back = [*model.held(), *model.trained]
        assert self.runner.run(self.store.restart(model.checkpoint)) == len(back)
        model.back_to_ready(back)
        model.leased.clear()
        model.trained.clear()
        model.next_step = model.checkpoint

    # --- deadlines -----------------------------------------------------------------------------------------------

    @rule()
    def apply_the_deadlines(self) -> None:
        model = self.model
        late = [id for id, ticket in model.in_flight.items() if ticket.doomed]
        lapsing = [lease for lease in model.leased.values() if lease.doomed and not lease.lapsed]
        swept = self.runner.run(self.store.sweep())
        assert swept == (len(late), sum(len(lease.ids) for lease in lapsing))
        for id in late:
            model.reissue.append(model.in_flight.pop(id).task)
            model.gone.add(id)
            model.reissued += 1
        for lapsed in lapsing:
            lapsed.lapsed = True
            model.back_to_ready(lapsed.ids)

    # --- what holds after every operation ------------------------------------------------------------------------

    @invariant()
    def every_group_is_in_exactly_one_state(self) -> None:
        model = self.model
        counts = self.runner.run(self.store.counts())
        assert (counts.issued, counts.in_flight) == (model.issued, len(model.in_flight))
        assert (counts.ready, counts.leased) == (len(model.ready), len(model.held()))
        assert (counts.trained, counts.durable) == (len(model.trained) + len(model.durable), len(model.durable))
        assert (counts.filtered, counts.expired, counts.reissued) == (model.filtered, model.expired, model.reissued)
        assert counts.issued == (
            counts.in_flight + counts.ready + counts.leased + counts.trained
            + counts.filtered + counts.expired + counts.reissued
        )  # fmt: skip

    @invariant()
    def exactly_the_groups_that_may_be_read_again_are_stored(self) -> None:
        model = self.model
        stored = {*model.ready, *model.held(), *model.trained}
        ids = [str(number) for number in range(1, model.issued + 1)]
        blobs = self.runner.run(self._blobs(ids))
        assert blobs == [f"{id} from {model.oldest[id]}".encode() if id in stored else None for id in ids]

    @invariant()
    def every_server_is_charged_for_its_tickets_in_flight(self) -> None:
        charged = self.runner.run(self._charged())
        servers = [ticket.server for ticket in self.model.in_flight.values()]
        assert charged == {server: servers.count(server) for server in set(servers)}

    # --- helpers -------------------------------------------------------------------------------------------------

    def _deliver(self, id: str, oldest: int) -> str:
        blob = f"{id} from {oldest}".encode()
        group = DeliveredGroup(id, oldest, action_tokens=1, blob=blob)
        (outcome,) = self.runner.run(self.store.deliver([group]))
        return outcome

    def _lease(self, step: int, consuming_version: int, *, doomed: bool) -> list[str]:
        return self.runner.run(
            lease(
                self.store, step, PER_STEP, consuming_version=consuming_version, max_staleness=MAX_STALENESS,
                deadline_s=AT_ONCE_S if doomed else LATER_S,
            )
        )  # fmt: skip

    async def _blobs(self, ids: list[str]) -> list[bytes | None]:
        blobs: list[Any] = await self.redis.mget([group_key(self.run, id) for id in ids]) if ids else []
        return blobs

    async def _charged(self) -> dict[str, int]:
        raw: dict[Any, Any] = await self.redis.hgetall(f"{run_prefix(self.run)}:in_flight")
        return {server.decode(): int(tickets) for server, tickets in raw.items()}

    async def _finish(self) -> None:
        """At the end of a run whatever is in flight expires, and nothing is left hanging."""
        expired = await self.store.finish()
        counts = await self.store.counts()
        await self.redis.aclose()
        assert expired == len(self.model.in_flight)
        assert (counts.in_flight, counts.leased, counts.expired) == (0, 0, self.model.expired + expired)
        assert counts.issued == counts.ready + counts.trained + counts.filtered + counts.expired + counts.reissued


def test_no_interleaving_breaks_the_ledger(redis_url: str, run_name: str) -> None:
    machine = type("Machine", (Interleavings,), {"redis_url": redis_url, "run_name": run_name})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=50, stateful_step_count=40, deadline=None),
    )
