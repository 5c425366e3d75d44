"""The buffer service over real sockets, on a real server."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import zmq

from slipstream.buffer.client.groups import GroupReader
from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.service import BufferService
from slipstream.buffer.store.types import DeliveredGroup, Lease, SweepResult
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.buffer.wire.sockets import bind_router
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from tests.buffer.groups import answered, train_group
from tests.buffer.peers import PATIENCE_S, Peer, connected, learner, reissued, serving, until


async def test_a_stranger_is_asked_who_it_is(server: Peer) -> None:
    await server.credits(8)
    await server.receive(m.UnknownPeer)
    await server.send(m.Deliver(ids=["1"]), encode(train_group("1")))
    await server.receive(m.UnknownPeer)
    await server.send(m.GroupFailed(id="1", kind=m.TRAIN, reason="broken", detail=""))
    await server.receive(m.UnknownPeer)
    assert (await server.state()).counts == m.LedgerCounts()


async def test_a_busy_address_is_named(service: BufferService, config: RunConfig) -> None:
    with zmq.asyncio.Context() as context, pytest.raises(ConfigError, match=config.buffer.bind):
        bind_router(context, config.buffer.bind, max_message_bytes=1 << 20)


# --- tickets, groups, leases ---------------------------------------------------------------------------------------


async def test_tickets_flow_up_to_the_credits(server: Peer, config: RunConfig) -> None:
    await server.join(credits=3)
    tickets = await server.tickets()
    order = task_order(10, seed=config.run.seed, epoch=0)
    assert [ticket.indices for ticket in tickets] == [[order[0]], [order[1]], [order[2]]]
    assert {(ticket.kind, ticket.samples, ticket.version) for ticket in tickets} == {(m.TRAIN, 2, 0)}
    await server.credits(5)
    assert len(await server.tickets()) == 2
    await server.credits(100)
    assert len(await server.tickets()) == 3, "8 = (max_staleness + 1) · groups_per_step may be under way"


@pytest.mark.parametrize(("advantage", "greedy"), [("grpo", False), ("remax", True)])
async def test_only_the_tickets_of_a_remax_run_ask_for_a_greedy_answer_too(
    config: RunConfig, advantage: str, greedy: bool
) -> None:
    learner = {"groups_per_step": 4, "advantage": advantage}
    async with (
        serving(RunConfig.model_validate(config.model_dump() | {"learner": learner})),
        connected(config) as server,
    ):
        await server.join(credits=1)
        assert [ticket.greedy for ticket in await server.tickets()] == [greedy]


async def test_neither_a_lease_nor_a_learner_waits_for_groups_that_are_being_stored(
    server: Peer, service: BufferService, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.join(credits=5)
    *tickets, last = await server.tickets()
    await server.credits(0)
    await server.deliver(*(answered(ticket) for ticket in tickets))
    storing, go_on, deliver = asyncio.Event(), asyncio.Event(), service.ledger.deliver

    async def slowly(groups: Sequence[DeliveredGroup]) -> list[str]:
        storing.set()
        await go_on.wait()
        return await deliver(groups)

    monkeypatch.setattr(service.ledger, "deliver", slowly)
    await server.send(m.Deliver(ids=[last.id]), encode(answered(last)))
    async with asyncio.timeout(PATIENCE_S):
        await storing.wait()
    async with learner(config) as client:
        await asyncio.to_thread(client.hello, 0)
        lease = await asyncio.to_thread(client.lease, 0, count=4, consuming_version=0, wait_s=60.0)
        assert lease is not None
        assert (await asyncio.to_thread(client.trained, 0)).counts.trained == 4
    go_on.set()
    assert (await server.receive(m.Acknowledge)).outcomes == {last.id: "ready"}


async def test_a_delivered_group_is_acknowledged_and_leased_as_it_was_sent(server: Peer, config: RunConfig) -> None:
    await server.join(credits=4)
    groups = [answered(ticket) for ticket in await server.tickets()]
    await server.credits(0)
    assert await server.deliver(*groups) == {group.id: "ready" for group in groups}
    async with learner(config) as client:
        await asyncio.to_thread(client.hello, 0)
        lease = await asyncio.to_thread(client.lease, 0, count=4, consuming_version=0, wait_s=1.0)
        assert lease == Lease([group.id for group in groups], [1.0] * 4)
        assert GroupReader(config.redis, run=config.run.name).read(lease.ids) == groups
        assert (await asyncio.to_thread(client.trained, 0)).counts.trained == 4
        counts = (await asyncio.to_thread(client.checkpointed, 1)).counts
    assert (counts.issued, counts.durable, counts.tokens) == (4, 4, 16)


async def test_a_group_that_is_sent_again_is_stored_once(server: Peer) -> None:
    await server.join(credits=1)
    (group,) = [answered(ticket) for ticket in await server.tickets()]
    await server.credits(0)
    assert await server.deliver(group) == {group.id: "ready"}
    assert await server.deliver(group) == {group.id: "duplicate"}
    counts = (await server.state()).counts
    assert (counts.issued, counts.ready, counts.tokens) == (1, 1, 4)


async def test_a_failed_ticket_is_counted_and_gives_its_credit_back(server: Peer) -> None:
    await server.join(credits=1)
    (ticket,) = await server.tickets()
    await server.send(m.GroupFailed(id=ticket.id, kind=m.TRAIN, reason="prompt_too_long", detail="task 5", tokens=70))
    assert (await server.receive(m.Acknowledge)).outcomes == {ticket.id: "filtered"}
    assert len(await server.tickets()) == 1
    assert (await server.state()).counts.reasons == {"filtered:prompt_too_long": 1}


async def test_a_lease_waits_for_groups_that_arrive_in_time(server: Peer, config: RunConfig) -> None:
    await server.join(credits=4)
    groups = [answered(ticket) for ticket in await server.tickets()]
    async with connected(config, "feed") as feed:
        await feed.lead()
        await feed.send(m.LeaseRequest(request=1, incarnation="a1", step=0, count=4, consuming_version=0, wait_s=60.0))
        await feed.send(m.StateRequest(request=2))
        assert (await feed.receive(m.State, among=m.ToLearner)).request == 2, "no lease yet"
        await server.deliver(*groups)
        lease = await feed.receive(m.Lease, among=m.ToLearner)
    assert (lease.request, lease.group_ids) == (1, [group.id for group in groups])


async def test_a_lease_that_can_not_be_had_in_time_is_declined_at_once(
    service: BufferService, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.service.SWEEP_S", PATIENCE_S)
    async with learner(config) as client:
        assert await asyncio.to_thread(client.lease, 0, count=4, consuming_version=0, wait_s=0.05) is None


async def test_only_the_last_of_a_learners_lease_requests_is_answered(server: Peer, config: RunConfig) -> None:
    await server.join(credits=2)
    groups = [answered(ticket) for ticket in await server.tickets()]
    async with connected(config, "feed") as feed:
        await feed.lead()
        request = m.LeaseRequest(request=1, incarnation="a1", step=0, count=2, consuming_version=0, wait_s=60.0)
        for number in (1, 2):
            await feed.send(msgspec.structs.replace(request, request=number))
        await feed.state()  # both have arrived
        await server.deliver(*groups)
        assert (await feed.receive(m.Lease, among=m.ToLearner)).request == 2
        await feed.state()  # and nothing came in between


async def test_the_end_of_the_run_expires_what_is_in_flight(server: Peer, config: RunConfig) -> None:
    await server.join(credits=2)
    (first, _) = await server.tickets()
    async with learner(config) as client:
        counts = (await asyncio.to_thread(client.finish)).counts
    assert (counts.in_flight, counts.expired) == (0, 2)
    assert await server.deliver(answered(first)) == {first.id: "finished"}


async def test_tickets_past_their_deadline_are_issued_again(config: RunConfig) -> None:
    hasty = config.model_copy(update={"buffer": config.buffer.model_copy(update={"ticket_deadline_s": 0.001})})
    async with serving(hasty) as service, connected(config) as server:
        await server.join(credits=1)
        (late,) = await server.tickets()
        await until(lambda: reissued(service, 1))
        await server.credits(1, held=[late.id])
        await server.state()  # and nothing came before: it has its hands full
        await server.credits(1)
        (again,) = await server.tickets()
    assert again.id != late.id
    assert again.indices == late.indices


# --- evaluation ----------------------------------------------------------------------------------------------------


async def publish(config: RunConfig, version: int, *, evaluate: bool) -> m.State:
    async with learner(config) as client:
        return await asyncio.to_thread(client.published, version, evaluate=evaluate)


async def test_only_servers_that_run_the_version_evaluate_it_and_hear_when_it_is_drained(
    server: Peer, config: RunConfig
) -> None:
    async with connected(config, "r1") as behind:
        await server.join(version=1)
        await behind.join(version=0)
        await behind.state()
        await publish(config, 1, evaluate=True)
        (first,) = await server.tickets()
        assert await server.deliver(answered(first, reward=1.0)) == {first.id: "evaluated"}
        (second,) = await server.tickets()
        assert [first.indices, second.indices] == [list(range(64)), list(range(64, 100))]
        assert {(ticket.kind, ticket.samples, ticket.version) for ticket in (first, second)} == {(m.EVAL, 1, 1)}
        assert (await server.receive(m.EvalDrained)).version == 1
        assert (await behind.receive(m.EvalDrained)).version == 0, "it need not wait for its part any more"
        assert (await behind.state()).version == 1, "and nothing else was sent to it"
        assert (await server.state()).evals == []
        await server.deliver(answered(second, reward=0.0))
    (report,) = (await server.state()).evals
    assert (report.version, report.tasks, report.score) == (1, 100, 0.64)
    answers = GroupReader(config.redis, run=config.run.name).read(report.group_ids)
    assert sum(len(group.trajectories) for group in answers) == 100


async def test_an_evaluation_that_was_asked_for_before_there_was_a_server_is_done_by_the_first_one(
    server: Peer, service: BufferService, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.service.SWEEP_S", 0.01)
    await publish(config, 0, evaluate=True)
    swept = asyncio.Event()
    sweep = service.ledger.sweep

    async def seen(**how: Any) -> SweepResult:
        swept.set()
        return await sweep(**how)

    monkeypatch.setattr(service.ledger, "sweep", seen)
    for _ in range(2):  # the second one begins when what the first one found is known
        swept.clear()
        await asyncio.wait_for(swept.wait(), PATIENCE_S)
    await server.join()
    assert {ticket.kind for ticket in await server.tickets()} == {m.EVAL}


async def test_servers_of_one_version_share_its_evaluation(server: Peer, config: RunConfig) -> None:
    async with connected(config, "r1") as other:
        for peer in (server, other):
            await peer.join()
            await peer.state()
        await publish(config, 0, evaluate=True)
        (mine,), (theirs,) = await server.tickets(), await other.tickets()
    assert sorted([*mine.indices, *theirs.indices]) == list(range(100))


async def test_a_server_with_fewer_held_out_tasks_than_asked_for_answers_those(
    service: BufferService, config: RunConfig
) -> None:
    async with connected(config) as server:
        await server.hello(eval_tasks=7)
        await server.receive(m.Welcome)
        await publish(config, 0, evaluate=True)
        await server.credits(0)
        (ticket,) = await server.tickets()
    assert ticket.indices == list(range(7))


async def test_evaluation_answers_are_never_trained_on(server: Peer, config: RunConfig) -> None:
    await server.join()
    await publish(config, 0, evaluate=True)
    tickets = await server.tickets()
    await server.receive(m.EvalDrained)
    await server.deliver(*(answered(ticket) for ticket in tickets))
    assert (await server.state()).counts == m.LedgerCounts()
    async with learner(config) as client:
        assert await asyncio.to_thread(client.lease, 0, count=1, consuming_version=0, wait_s=0.05) is None


async def test_answers_without_a_finite_score_spoil_no_evaluation(server: Peer, config: RunConfig) -> None:
    await server.join()
    await publish(config, 0, evaluate=True)
    (ticket, _) = await server.tickets()
    await server.receive(m.EvalDrained)
    await server.deliver(answered(ticket, reward=float("nan")))
    assert (await server.state()).counts.dropped_frames == 1
    assert await server.deliver(answered(ticket)) == {ticket.id: "evaluated"}


# --- restarts ------------------------------------------------------------------------------------------------------


async def test_a_restarted_service_goes_on_with_nothing_lost(config: RunConfig) -> None:
    async with connected(config) as server:
        async with serving(config):
            await server.join(credits=3)
            tickets = await server.tickets()
            await server.credits(0)
            await server.deliver(answered(tickets[0]))
            before = (await server.state()).counts
        async with serving(config):
            await server.credits(4)
            await server.receive(m.UnknownPeer)
            assert (await server.state()).counts == before
            await server.join(credits=3)
            (new,) = await server.tickets()
            assert new.id not in {ticket.id for ticket in tickets}
            await server.credits(0)
            outcomes = await server.deliver(*(answered(ticket) for ticket in [*tickets, new]))
            assert list(outcomes.values()) == ["duplicate", "ready", "ready", "ready"]
            counts = (await server.state()).counts
    assert (counts.issued, counts.ready) == (4, 4)


async def test_a_restarted_service_goes_on_with_the_evaluation(config: RunConfig) -> None:
    async with connected(config) as server:
        async with serving(config):
            await server.join(version=9)
            await publish(config, 0, evaluate=True)
        async with serving(config):
            await server.join(version=0)
            assert {ticket.kind for ticket in await server.tickets()} == {m.EVAL}


async def test_a_restarted_service_issues_tasks_where_the_last_one_stopped(config: RunConfig) -> None:
    seen = []
    async with connected(config) as server:
        for credits in (2, 4):
            async with serving(config):
                await server.join(credits=credits)
                seen += [index for ticket in await server.tickets() for index in ticket.indices]
    assert seen == task_order(10, seed=config.run.seed, epoch=0)[:4].tolist()


def test_the_counts_name_every_state_of_the_invariant() -> None:
    """LedgerCounts is what the invariant is checked on: a new state must be added to it, and to the tests."""
    names = {field.name for field in msgspec.structs.fields(m.LedgerCounts)}
    assert names == {
        "issued", "in_flight", "ready", "leased", "trained", "durable", "filtered", "expired", "reissued",
        "tokens", "reasons", "dropped_frames", "uses", "answers_dropped",
    }  # fmt: skip
