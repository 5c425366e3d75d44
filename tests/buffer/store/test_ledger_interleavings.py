"""The ledger under random interleavings of operations, deadlines, failures and clock jumps.

After every operation the real ledger must match a model in Python and pass its own `verify`.
"""

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from slipstream.buffer.store.account import account
from slipstream.buffer.store.reader import LedgerReader
from slipstream.buffer.store.redis import run_prefix
from slipstream.buffer.store.spill import Spiller, SpillFolder
from slipstream.buffer.store.types import SpilledGroupsError
from slipstream.buffer.wire.messages import LedgerCounts
from tests.buffer.ledger import (
    AT_ONCE_S,
    LATER_S,
    TRAIN_TASKS,
    counts,
    deliver,
    fail,
    heartbeat,
    issue,
    lease,
    ledger,
    tickets_of,
)
from tests.buffer.store.ledger_model import MAX_STALENESS, PER_STEP, PER_VERSION, Lease, Model, Ticket

SERVERS = "ab"
SKIPS: tuple[tuple[int, ...], ...] = ((), (0,), (1, 2, TRAIN_TASKS))
"""Tasks that a grant skips, by their distance from the cursor."""
GROUP_TOKENS = 3
EFFECTS = ("delivered", "leased", "trained", "made durable", "given back by a restart", "lapsed", "read back",
           "repeated", "not repeated")  # fmt: skip


class Interleavings(RuleBasedStateMachine):
    """Issue, deliver, fail, lease, train, publish, checkpoint, deadlines, deaths, clocks and restarts, in any order."""

    redis_url: str
    run_name: str
    max_uses: int
    spill_root: Path
    numbers = itertools.count()
    effects: Counter[str]
    """Groups per effect, over all sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.run = f"{self.run_name}-{next(self.numbers)}"
        self.redis = Redis.from_url(self.redis_url)
        self.store = ledger(self.redis, self.run, max_uses=self.max_uses, groups_per_step=PER_STEP, spill_bytes=0)
        folder = SpillFolder(self.spill_root / self.run)
        self.spiller = Spiller(self.store.scripts, folder, spill_bytes=0)
        self.reader = LedgerReader(self.redis, self.run, folder)
        self.model = Model(self.max_uses)
        self.runner.run(self.store.identify({"train_tasks": str(TRAIN_TASKS)}))  # otherwise verify ignores the cursor

    def teardown(self) -> None:
        self.runner.run(self._finish())
        self.runner.close()

    # --- servers -------------------------------------------------------------------------------------------------

    @rule(server=st.sampled_from(SERVERS), credits=st.integers(3, 9), lag=st.integers(0, 2), doomed=st.booleans())
    def issue(self, server: str, credits: int, lag: int, doomed: bool) -> None:
        model = self.model
        skip = [divmod(model.cursor + ahead, TRAIN_TASKS) for ahead in SKIPS[credits % len(SKIPS)]]
        version = max(0, model.version - lag)
        expected = max(0, min(model.capacity(version), credits - len(model.charged(server))))
        granted = self.runner.run(
            issue(
                self.store, credits, server=server, server_version=version, max_staleness=MAX_STALENESS,
                groups_per_version=PER_VERSION, deadline_s=AT_ONCE_S if doomed else LATER_S, skip=skip,
            )
        )  # fmt: skip
        assert len(granted) == expected
        for task in granted:
            if model.reissue:
                model.reissue.remove((task.epoch, task.position))
            else:
                while divmod(model.cursor, TRAIN_TASKS) in skip:
                    model.cursor += 1
                    model.skipped += 1
                assert (task.epoch, task.position) == divmod(model.cursor, TRAIN_TASKS)
                model.cursor += 1
            model.issued += 1
            assert task.id == str(model.issued)
            model.holder[task.id] = server
            deadline_s = AT_ONCE_S if doomed else LATER_S
            model.in_flight[task.id] = Ticket((task.epoch, task.position), server, version, deadline_s)

    @precondition(lambda self: self.model.in_flight)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        for server in SERVERS:
            self._report_tokens(server)
        left_out = data.draw(st.integers(0, 1))
        for id in sorted(self.model.in_flight, key=int)[left_out:]:
            self._arrive(id, data.draw(st.integers(self.model.in_flight[id].version, self.model.version)))

    @precondition(lambda self: self.model.issued)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        model = self.model
        known = [id for id in map(str, range(1, model.issued + 1)) if id not in model.in_flight]
        if not known:
            return
        id = data.draw(st.sampled_from(known))
        assert self._deliver(id, 0) == ("duplicate" if id in model.oldest or id in model.failed else "void")

    @precondition(lambda self: self.model.in_flight)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.model.in_flight, key=int)))
        tokens, server = int(id) % GROUP_TOKENS, self.model.holder[id]
        assert self.runner.run(fail(self.store, id, tokens=tokens, server=server)) == "filtered"
        assert self.runner.run(fail(self.store, id, tokens=tokens, server=server)) == "duplicate"
        self.model.broken_tokens += tokens
        del self.model.in_flight[id]
        self.model.failed.add(id)
        self.model.filtered += 1

    @rule(server=st.sampled_from(SERVERS))
    def restart_server(self, server: str) -> None:
        self._report_tokens(server)
        incarnation = f"another {next(self.numbers)}"
        assert self.runner.run(self.store.join(server, incarnation)) == self.model.take_back(server)

    @rule(server=st.sampled_from(SERVERS))
    def remove_server(self, server: str) -> None:
        self._report_tokens(server)
        assert self.runner.run(self.store.leave(server, "of an earlier process")) == 0
        assert self.runner.run(self.store.leave(server, "first")) == self.model.take_back(server)

    @rule(server=st.sampled_from(SERVERS), data=st.data())
    def lose_tickets(self, server: str, data: st.DataObject) -> None:
        mine = self.model.charged(server)
        held = data.draw(st.sets(st.sampled_from(mine))) if mine else set()
        gone = set(mine) - held
        lost = gone & self.model.in_flight.keys()
        # Twice: the first heartbeat sets the time of a ticket from before a clock jump to the present.
        found = [self.runner.run(heartbeat(self.store, server, sorted(held), grace_s=-1.0)) for _ in range(2)]
        assert sum(found) == len(lost)
        for id in lost:
            self.model.reissue_ticket(id)
        for id in gone - lost:
            del self.model.late[id]

    @rule()
    def silence_all_servers(self) -> None:
        for server in SERVERS:
            self._report_tokens(server, late=True)
        swept = self.runner.run(self.store.sweep(silent_s=0.0))
        late, lapsing = self._due()
        servers = {ticket.server for ticket in self.model.in_flight.values()}
        assert servers <= set(swept.silent)
        assert swept.tickets == len(self.model.in_flight)
        for server in SERVERS:
            self.model.take_back(server)
        self._lapse(lapsing)
        assert not set(late) & self.model.in_flight.keys()

    # --- learner -------------------------------------------------------------------------------------------------

    @rule(ahead=st.integers(0, 1), doomed=st.booleans())
    def lease(self, ahead: int, doomed: bool) -> None:
        """Leases the next step: one is trained while the next is fetched."""
        model = self.model
        step = model.next_step + len(model.leased)
        if len(model.leased) >= 2:
            return
        self._hold_again(doomed=doomed)
        consuming_version = model.version + ahead
        repeats = step < model.repeat_until
        expected = model.next_groups(step, consuming_version)
        got = self._lease(step, consuming_version, doomed=doomed)
        assert got == expected
        self.effects["not repeated"] += repeats and not model.repeat_until
        oldest = model.depth(consuming_version) - MAX_STALENESS
        assert all(model.depth(model.oldest[id]) >= oldest for id in got), "leased although too stale"
        if got:
            self.effects["repeated"] += repeats and model.repeat_until > step
            model.ready -= set(got)
            self.effects["leased"] += len(got)
            model.leased[step] = Lease(got, AT_ONCE_S if doomed else LATER_S)

    @rule()
    def repeat_lease(self) -> None:
        for step, held in self.model.leased.items():
            self._hold_again(doomed=False)
            assert self._lease(step, 0, doomed=False) == held.ids

    @precondition(lambda self: self.model.next_step in self.model.leased)
    @rule(forgotten=st.booleans())
    def train(self, forgotten: bool) -> None:
        """Trains a step whose lease may have expired; `forgotten`: two steps, Redis having lost the first request."""
        model = self.model
        steps = [model.next_step, model.next_step + 1][: 2 if forgotten else 1]
        trained = {step: model.leased.pop(step).ids for step in steps if step in model.leased}
        ids = {id for of_step in trained.values() for id in of_step}
        assert not ids & (model.trained | model.durable), "used more often than allowed"
        assert self.runner.run(self.store.train(max(trained))) == len(ids)
        for step, of_step in trained.items():
            for id in of_step:
                model.ready.discard(id)
                model.uses.setdefault(id, []).append(step)
                (model.ready if len(model.uses[id]) < model.max_uses else model.trained).add(id)
        self.effects["trained"] += len(ids)
        model.consumed += len(ids)
        model.next_step += len(trained)
        model.version_after[model.next_step] = model.version
        model.resumed_depth = None
        for step in trained:
            model.undone.pop(step, None)

    @rule()
    def publish(self) -> None:
        self.model.publish()
        self.runner.run(self.store.publish(self.model.version, evaluate=False))

    @rule()
    def save_checkpoint(self) -> None:
        model = self.model
        model.checkpoint = model.next_step
        assert self.runner.run(self.store.durable(model.checkpoint)) == len(model.trained)
        self.effects["made durable"] += len(model.trained)
        model.durable |= model.trained
        model.trained.clear()

    @rule()
    def spill(self) -> None:
        self.runner.run(self.spiller.spill())

    @rule(data=st.data(), published=st.integers(0, 3), spilled=st.booleans())
    def restart_learner(self, data: st.DataObject, published: int, spilled: bool) -> None:
        """From the latest checkpoint, or from an older one; `spilled`: the first lease has to read groups back."""
        model = self.model
        if spilled:
            self.spill()
        done = data.draw(st.sampled_from([model.checkpoint, model.checkpoint // 2]))
        undone = {id for id in model.trained | model.durable if model.uses[id][-1] >= done}
        back = {*model.held(), *undone}
        # The groups of undone steps are in the pipeline again.
        undone_uses = sum(step >= done for steps in model.uses.values() for step in steps)
        version = model.restart(done)
        found = self.runner.run(self.store.restart(done, learner=str(next(self.numbers)), version=version))
        assert found == (len(back), 0)
        self.effects["given back by a restart"] += len(back)
        model.consumed = max(0, model.consumed - undone_uses)
        model.ready |= back
        model.leased.clear()
        model.trained -= undone
        model.durable -= undone
        model.next_step = model.checkpoint = done
        for _ in range(published):
            self.publish()
        if spilled or published > 1:
            self.lease(0, False)

    # --- both ----------------------------------------------------------------------------------------------------

    @initialize(groups=st.integers(0, 4), late=st.booleans(), trained=st.booleans(), saved=st.booleans())
    def begin(self, groups: int, late: bool, trained: bool, saved: bool) -> None:
        """A started run: otherwise most sequences end before they hold groups."""
        self.run_step(groups, late, trained, saved)

    @rule(groups=st.integers(1, 4), late=st.booleans(), trained=st.booleans(), saved=st.booleans())
    def run_step(self, groups: int, late: bool, trained: bool, saved: bool) -> None:
        """One training step; `late`: longer than its lease."""
        model = self.model
        wanted = min(groups, model.capacity(model.version))
        if wanted > 0:
            self.issue("a", len(model.charged("a")) + wanted, 0, False)
        for id in sorted(model.in_flight, key=int):
            self._arrive(id, model.in_flight[id].version)
        self.lease(0, late)
        if late:
            self.apply_deadlines()
        if trained and model.next_step in model.leased:
            self.train(False)
        if saved:
            self.save_checkpoint()

    # --- deadlines -----------------------------------------------------------------------------------------------

    @rule()
    def apply_deadlines(self) -> None:
        late, lapsing = self._due()
        swept = self.runner.run(self.store.sweep(silent_s=None))
        assert (swept.tickets, swept.leases) == (len(late), sum(len(lease.ids) for lease in lapsing))
        for id in late:
            self.model.late[id] = self.model.in_flight[id].server
            self.model.reissue_ticket(id)
        self._lapse(lapsing)

    @rule(ahead=st.booleans())
    def jump_clock(self, ahead: bool) -> None:
        """Shifts all times in the ledger by more than any deadline."""
        by_s = -2 * LATER_S if ahead else 2 * LATER_S
        self.runner.run(self._shift_times(by_s))
        for ticket in self.model.in_flight.values():
            ticket.deadline_s += by_s
        for held in self.model.leased.values():
            held.deadline_s += by_s

    # --- invariants ----------------------------------------------------------------------------------------------

    @invariant()
    def ledger_matches_model(self) -> None:
        model = self.model
        stored = {*model.ready, *model.held(), *model.trained, *model.durable}
        ids = [str(number) for number in range(1, model.issued + 1)]
        found, rate_limit, problems, blobs, charged = self.runner.run(self._content(ids))
        assert (found.issued, found.in_flight) == (model.issued, len(model.in_flight))
        assert (found.ready, found.leased) == (len(model.ready), len(model.held()))
        assert (found.trained, found.durable) == (len(model.trained) + len(model.durable), len(model.durable))
        assert (found.filtered, found.expired, found.reissued) == (model.filtered, model.expired, model.reissued)
        assert (found.uses, found.skipped_tasks) == (sum(map(len, model.uses.values())), model.skipped)
        assert found.issued == (
            found.in_flight + found.ready + found.leased + found.trained
            + found.filtered + found.expired + found.reissued
        )  # fmt: skip
        there = {*model.ready, *model.held()}
        assert rate_limit == [len(there), sum(len(model.uses.get(id, [])) for id in there)]
        assert problems == []
        assert blobs == [f"bytes of {id}".encode() if id in stored else None for id in ids]
        assert charged == [len(model.charged(server)) for server in SERVERS]
        self._account_matches_model()

    def _account_matches_model(self) -> None:
        model, total = self.model, self.runner.run(account(self.store.scripts)).total
        used = [steps for steps in model.uses.values() if steps]
        waiting = [id for id in (*model.ready, *model.held()) if not model.uses.get(id)]
        assert (total.trained, total.ready + total.leased) == (GROUP_TOKENS * len(used), GROUP_TOKENS * len(waiting))
        assert total.uses == GROUP_TOKENS * sum(map(len, used))
        assert total.lost.get("too_stale", 0) == GROUP_TOKENS * model.expired
        assert total.lost.get("broken", 0) == model.broken_tokens
        assert total.closes

    # --- helpers -------------------------------------------------------------------------------------------------

    def _due(self) -> tuple[list[str], list[Lease]]:
        """Tickets and leases whose deadline has passed."""
        late = [id for id, ticket in self.model.in_flight.items() if ticket.deadline_s <= 0]
        return late, [lease for lease in self.model.leased.values() if lease.deadline_s <= 0 and not lease.lapsed]

    def _lapse(self, leases: list[Lease]) -> None:
        for lapsed in leases:
            lapsed.lapsed = True
            self.effects["lapsed"] += len(lapsed.ids)
            self.model.ready |= set(lapsed.ids)

    def _hold_again(self, *, doomed: bool) -> None:
        """Every lease request first renews expired leases of untrained steps."""
        for held in self.model.leased.values():
            if held.lapsed:
                held.lapsed, held.deadline_s = False, AT_ONCE_S if doomed else LATER_S
                self.model.ready -= set(held.ids)

    def _report_tokens(self, server: str, *, late: bool = False) -> None:
        """A heartbeat with tokens; `late`: also of the last ticket that it was thought to hold no more."""
        held = self.model.charged(server)
        gone = [id for id, holder in self.model.holder.items() if late and holder == server and id not in held][-1:]
        sampled = {id: (int(id) + self.model.cursor) % GROUP_TOKENS for id in [*held, *gone]}
        assert self.runner.run(heartbeat(self.store, server, [*held, *gone], sampled=sampled)) == 0
        for id in gone:
            if id not in self.model.oldest and id not in self.model.failed:
                self.model.late[id] = server

    def _arrive(self, id: str, oldest: int) -> None:
        del self.model.in_flight[id]
        assert self._deliver(id, oldest) == "ready"
        self.effects["delivered"] += 1
        self.model.ready.add(id)
        self.model.oldest[id] = oldest

    def _deliver(self, id: str, oldest: int) -> str:
        delivering = deliver(self.store, [id], oldest_version=oldest, length=GROUP_TOKENS, server=self.model.holder[id])
        (outcome,) = self.runner.run(delivering)
        return outcome

    def _lease(self, step: int, consuming_version: int, *, doomed: bool) -> list[str]:
        while True:
            try:
                return self.runner.run(
                    lease(
                        self.store, step, PER_STEP, consuming_version=consuming_version, max_staleness=MAX_STALENESS,
                        deadline_s=AT_ONCE_S if doomed else LATER_S,
                    )
                )  # fmt: skip
            except SpilledGroupsError as error:
                self.runner.run(self.spiller.restore(error.ids))
                self.effects["read back"] += len(error.ids)

    async def _content(
        self, ids: list[str]
    ) -> tuple[LedgerCounts, list[int], list[str], list[bytes | None], list[int]]:
        """Counts, counts of the rate limit, problems, bytes of these groups, and tickets of each server."""
        charged = asyncio.gather(*(tickets_of(self.store, server) for server in SERVERS))
        return await asyncio.gather(
            counts(self.store), self._counted("inserts", "samples"), self.store.verify(), self._blobs(ids), charged
        )

    async def _blobs(self, ids: list[str]) -> list[bytes | None]:
        return [None if record is None else record.blob for record in await self.reader.groups(ids)]

    async def _counted(self, *names: str) -> list[int]:
        raw: list[Any] = await self.redis.hmget(f"{run_prefix(self.run)}:meta", names)
        return [int(value or 0) for value in raw]

    async def _shift_times(self, by_s: float) -> None:
        prefix = run_prefix(self.run)
        for name in ("issued", "leased", "heard"):
            members: list[Any] = await self.redis.zrange(f"{prefix}:{name}", 0, -1)
            for member in members:
                await self.redis.zincrby(f"{prefix}:{name}", by_s, member)
        for id in self.model.in_flight:
            await self.redis.hincrbyfloat(f"{prefix}:about:{id}", "issued_at", by_s)

    async def _finish(self) -> None:
        """The end of the run expires tickets in flight and leaves no lease."""
        expired = await self.store.finish()
        found = await counts(self.store)
        problems = await self.store.verify()
        await self.redis.aclose()
        assert expired == len(self.model.in_flight)
        assert (found.in_flight, found.leased, found.expired) == (0, 0, self.model.expired + expired)
        assert found.issued == found.ready + found.trained + found.filtered + found.expired + found.reissued
        assert problems == []


@pytest.mark.parametrize("max_uses", [1, 2])
def test_interleavings_keep_ledger_consistent(redis_url: str, run_name: str, tmp_path: Path, max_uses: int) -> None:
    effects: Counter[str] = Counter()
    given = {
        "redis_url": redis_url, "run_name": run_name, "max_uses": max_uses, "effects": effects, "spill_root": tmp_path,
    }  # fmt: skip
    machine = type("Machine", (Interleavings,), given)
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))
    assert [effect for effect in EFFECTS if not effects[effect]] == [], "effects that no sequence reached"
