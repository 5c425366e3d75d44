"""The buffer service over real sockets and a real Redis."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from slipstream.buffer.client import GroupReader
from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.service import BufferService
from slipstream.buffer.store.types import DeliveredGroup, LeasedGroups, SweepResult
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from tests.buffer.groups import answered, train_group
from tests.buffer.peers import PATIENCE_S, Peer, connected, learner, reissued, serving, until


async def test_unknown_peer_is_asked_for_hello(server: Peer) -> None:
    await server.credits(8)
    await server.receive(m.UnknownPeer)
    await server.send(m.Deliver(ids=["1"]), encode(train_group("1")))
    await server.receive(m.UnknownPeer)
    await server.send(m.GroupFailed(id="1", kind=m.TRAIN, reason="broken", detail=""))
    await server.receive(m.UnknownPeer)
    assert (await server.state()).counts == m.LedgerCounts()


# --- tickets, groups, leases ---------------------------------------------------------------------------------------


async def test_tickets_are_limited_by_credits_and_staleness(server: Peer, config: RunConfig) -> None:
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
async def test_remax_tickets_request_greedy_sample(config: RunConfig, advantage: str, greedy: bool) -> None:
    learner = {"groups_per_step": 4, "advantage": advantage}
    async with (
        serving(RunConfig.model_validate(config.model_dump() | {"learner": learner})),
        connected(config) as server,
    ):
        await server.join(credits=1)
        assert [ticket.greedy for ticket in await server.tickets()] == [greedy]


async def test_storing_groups_does_not_block_learner(
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


async def test_delivered_groups_are_leased_unchanged(server: Peer, config: RunConfig) -> None:
    await server.join(credits=4)
    groups = [answered(ticket) for ticket in await server.tickets()]
    await server.credits(0)
    assert await server.deliver(*groups) == {group.id: "ready" for group in groups}
    async with learner(config) as client:
        await asyncio.to_thread(client.hello, 0)
        lease = await asyncio.to_thread(client.lease, 0, count=4, consuming_version=0, wait_s=1.0)
        assert lease == LeasedGroups([group.id for group in groups], [1.0] * 4, 0, [0])
        assert GroupReader(config.redis, run=config.run.name).read(lease.ids) == groups
        assert (await asyncio.to_thread(client.trained, 0)).counts.trained == 4
        counts = (await asyncio.to_thread(client.checkpointed, 1)).counts
    assert (counts.issued, counts.durable, counts.tokens) == (4, 4, 16)


async def test_failed_ticket_returns_its_credit(server: Peer) -> None:
    await server.join(credits=1)
    (ticket,) = await server.tickets()
    failed = m.GroupFailed(
        id=ticket.id, kind=m.TRAIN, reason="reward_crash", detail="task 5", tokens=70, lengths=[30, 40]
    )
    await server.send(failed)
    assert (await server.receive(m.Acknowledge)).outcomes == {ticket.id: "filtered"}
    assert len(await server.tickets()) == 1
    counts = (await server.state()).counts
    assert (counts.reasons, counts.answers_dropped) == ({"filtered:reward_crash": 1}, {"reward_crash": 2})


async def test_lost_answers_are_counted_by_reason_and_length(config: RunConfig) -> None:
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"group_size": 4})})
    lost = {"reward_timeout": [40], "reward_error": [3]}
    async with serving(config) as service, connected(config) as server:
        await server.join(credits=1)
        (ticket,) = await server.tickets()
        group = answered(ticket)
        await server.deliver(msgspec.structs.replace(group, trajectories=group.trajectories[:2], missing=2, lost=lost))
        assert (await service.ledger.counts()).answers_dropped == {"reward_timeout": 1, "reward_error": 1}
        lengths = await service.ledger.lengths(list(lost))
    assert lengths.pop("delivered") == {2: 2, 3: 1, 40: 1}
    assert lengths == {"trained": {}, "reward_timeout": {40: 1}, "reward_error": {3: 1}}


async def test_lease_waits_for_groups(server: Peer, config: RunConfig) -> None:
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


async def test_expired_tickets_are_reissued(config: RunConfig) -> None:
    hasty = config.model_copy(update={"buffer": config.buffer.model_copy(update={"ticket_deadline_s": 0.001})})
    async with serving(hasty) as service, connected(config) as server:
        await server.join(credits=1)
        (late,) = await server.tickets()
        await until(lambda: reissued(service, 1))
        await server.credits(1, held=[late.id])
        await server.state()  # no tickets before: its credits are used
        await server.credits(1)
        (again,) = await server.tickets()
    assert again.id != late.id
    assert again.indices == late.indices


# --- evaluation ----------------------------------------------------------------------------------------------------


async def publish(config: RunConfig, version: int, *, evaluate: bool) -> m.State:
    async with learner(config) as client:
        return await asyncio.to_thread(client.published, version, evaluate=evaluate)


async def test_servers_evaluate_only_their_version(server: Peer, config: RunConfig) -> None:
    async with connected(config, "r1") as behind:
        await server.join(credits=32, version=1)
        await behind.join(version=0)
        await behind.state()
        await publish(config, 1, evaluate=True)
        (first,) = await server.eval_tickets()
        assert await server.deliver(answered(first, reward=1.0)) == {first.id: "evaluated"}
        (second,) = await server.eval_tickets()
        assert [first.indices, second.indices] == [list(range(64)), list(range(64, 100))]
        assert {(ticket.kind, ticket.samples, ticket.version) for ticket in (first, second)} == {(m.EVAL, 1, 1)}
        assert (await server.receive(m.EvalDrained)).version == 1
        assert (await behind.receive(m.EvalDrained)).version == 0
        assert (await behind.state()).version == 1
        assert (await server.state()).evals == []
        await server.deliver(answered(second, reward=0.0))
    (report,) = (await server.state()).evals
    assert (report.version, report.tasks, report.score) == (1, 100, 0.64)
    answers = GroupReader(config.redis, run=config.run.name).read(report.group_ids)
    assert sum(len(group.trajectories) for group in answers) == 100


async def test_evaluation_waits_for_first_server(
    server: Peer, service: BufferService, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.service.SWEEP_S", 0.01)
    await publish(config, 0, evaluate=True)
    swept = asyncio.Event()
    sweep = service.ledger.sweep

    async def noted(**how: Any) -> SweepResult:
        swept.set()
        return await sweep(**how)

    monkeypatch.setattr(service.ledger, "sweep", noted)
    for _ in range(2):  # the second sweep starts after the effects of the first
        swept.clear()
        await asyncio.wait_for(swept.wait(), PATIENCE_S)
    await server.join(credits=1)
    assert await server.eval_tickets()


async def test_eval_tasks_are_capped_by_server(service: BufferService, config: RunConfig) -> None:
    async with connected(config) as server:
        await server.hello(eval_tasks=7)
        await server.receive(m.Welcome)
        await publish(config, 0, evaluate=True)
        await server.credits(4)
        (ticket,) = await server.eval_tickets()
    assert ticket.indices == list(range(7))


async def test_eval_groups_are_never_leased(server: Peer, config: RunConfig) -> None:
    await server.join(credits=50)
    await publish(config, 0, evaluate=True)
    tickets = await server.eval_tickets()
    await server.receive(m.EvalDrained)
    await server.deliver(*(answered(ticket) for ticket in tickets))
    counts = (await server.state()).counts
    assert (counts.in_flight, counts.tokens) == (counts.issued, 0)
    async with learner(config) as client:
        assert await asyncio.to_thread(client.lease, 0, count=1, consuming_version=0, wait_s=0.05) is None


# --- restarts ------------------------------------------------------------------------------------------------------


async def test_restarted_service_keeps_groups(config: RunConfig) -> None:
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


async def test_restarted_service_continues_evaluation(config: RunConfig) -> None:
    async with connected(config) as server:
        async with serving(config):
            await server.join(version=9)
            await publish(config, 0, evaluate=True)
        async with serving(config):
            await server.join(credits=1, version=0)
            assert await server.eval_tickets()
