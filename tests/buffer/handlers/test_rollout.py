"""Rollout servers that die, restart or lose messages: their tasks are issued again, once."""

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from redis.asyncio import Redis

from slipstream.buffer import service as service_module
from slipstream.buffer.handlers import fleet as fleet_module
from slipstream.buffer.handlers.rollout import MALFORMED_RETRIES
from slipstream.buffer.service import BufferService
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import run_prefix
from slipstream.buffer.store.types import SweepResult
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from tests.buffer.conftest import MakeConfig
from tests.buffer.groups import answered
from tests.buffer.ledger import issue
from tests.buffer.peers import Peer, announced, connected, reissued, serving, until


def positions(tickets: list[m.Ticket]) -> list[tuple[int, list[int]]]:
    """The tasks of tickets."""
    return [(ticket.epoch, ticket.indices) for ticket in tickets]


async def start_evaluation(server: Peer, service: BufferService) -> list[m.Ticket]:
    """Starts an evaluation of version 0; the tickets of a server that takes all of it."""
    await service.ledger.publish(0, evaluate=True)
    service.fleet.evaluating = 0
    await service.ledger.finish()  # no train tickets
    await server.credits(50)
    tickets = await server.tickets()
    await server.receive(m.EvalDrained)
    return tickets


def with_server_deadline(config: RunConfig, server_deadline_s: float) -> RunConfig:
    """A shorter deadline than a configuration may set: the servers of these tests send no heartbeats."""
    buffer = config.buffer.model_copy(update={"server_deadline_s": server_deadline_s})
    return config.model_copy(update={"buffer": buffer})


async def test_tickets_of_silent_server_are_reissued(make_config: MakeConfig) -> None:
    config = with_server_deadline(make_config(), 0.2)
    async with serving(config) as service, connected(config, "dead") as dead, connected(config, "alive") as alive:
        await dead.join(credits=2)
        lost = await dead.tickets()
        await until(lambda: reissued(service, 2))
        await alive.join(credits=2)
        again = await alive.tickets()
        assert positions(again) == positions(lost)
        assert not {ticket.id for ticket in again} & {ticket.id for ticket in lost}
        await dead.join()
        assert await dead.deliver(answered(lost[0])) == {lost[0].id: "void"}
        assert await alive.deliver(answered(again[0])) == {again[0].id: "ready"}
        assert await service.ledger.verify() == []


async def test_restarted_service_grants_servers_a_deadline(
    make_config: MakeConfig, store: Ledger, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "SWEEP_S", 0.2)
    deadline_s = 0.5
    config = with_server_deadline(make_config(), deadline_s)
    assert len(await issue(store, 2)) == 2
    await redis.zadd(f"{run_prefix(config.run.name)}:heard", {"r0": 0.0})
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with serving(config) as service:
        await until(lambda: reissued(service, 2))
    assert loop.time() - began >= deadline_s


async def test_redis_stall_makes_no_server_silent(
    make_config: MakeConfig, store: Ledger, redis: Redis, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "SWEEP_S", 0.1)
    loop = asyncio.get_running_loop()
    answers, asked, sweeps = asyncio.Event(), asyncio.Event(), list[tuple[float | None, list[str]]]()
    answers.set()
    async with serving(with_server_deadline(make_config(), 0.3)) as service:
        identity, sweep = service.ledger.identity, service.ledger.sweep

        async def slow_identity() -> dict[str, str]:
            asked.set()
            await answers.wait()
            return await identity()

        async def noted_sweep(*, silent_s: float | None, silences_s: Mapping[str, float]) -> SweepResult:
            swept = await sweep(silent_s=silent_s, silences_s=silences_s)
            sweeps.append((silent_s, swept.silent))
            return swept

        async def sweeps_servers() -> bool:
            return bool(sweeps) and sweeps[-1][0] is not None

        async def stalled() -> bool:
            return asked.is_set() and loop.time() - began > 0.3

        async def swept_again() -> bool:
            return bool(sweeps)

        monkeypatch.setattr(service.ledger, "identity", slow_identity)
        monkeypatch.setattr(service.ledger, "sweep", noted_sweep)
        await until(sweeps_servers)
        answers.clear()
        asked.clear()
        began = loop.time()
        await until(stalled)
        await redis.zadd(f"{run_prefix(run_name)}:heard", {"of another service": 0.0})
        sweeps.clear()
        answers.set()
        await until(swept_again)
    assert sweeps[0] == (None, [])


async def test_slow_sweep_detects_silent_servers(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "SWEEP_S", 0.1)
    config = with_server_deadline(make_config(), 0.2)
    async with serving(config) as service, connected(config) as server:
        length_bias = service.ledger.length_bias

        async def slowly(reasons: Sequence[str]) -> dict[str, float]:
            await asyncio.sleep(0.3)
            return await length_bias(reasons)

        monkeypatch.setattr(service.ledger, "length_bias", slowly)
        await server.join(credits=2)
        await server.tickets()
        await until(lambda: reissued(service, 2))


async def test_delivering_server_is_not_silent(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "SWEEP_S", 0.2)
    deadline_s = 1.0
    async with serving(with_server_deadline(make_config(), deadline_s)) as service, connected(make_config()) as server:
        await server.join(credits=2)
        first, second = await server.tickets()
        await server.credits(0)  # the last one
        assert await server.deliver(answered(first)) == {first.id: "ready"}
        loop = asyncio.get_running_loop()
        end = loop.time() + 2 * deadline_s
        while loop.time() < end:
            assert await server.deliver(answered(first)) == {first.id: "duplicate"}
        assert await server.deliver(answered(second)) == {second.id: "ready"}
        assert (await service.ledger.counts()).reissued == 0


async def test_acknowledge_precedes_welcome(
    server: Peer, service: BufferService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.join(credits=1)
    (ticket,) = await server.tickets()
    monkeypatch.setattr(service, "_delivered", asyncio.Event())  # nothing but the hello makes it store anything
    await server.send(announced(answered(ticket)), encode(answered(ticket)))
    await server.hello()
    assert (await server.receive(m.Acknowledge)).outcomes == {ticket.id: "ready"}
    await server.receive(m.Welcome)


async def test_restarted_server_gets_its_tasks_again(server: Peer, service: BufferService) -> None:
    await server.join(credits=2)
    lost = await server.tickets()
    await server.hello(incarnation="another process")
    await server.receive(m.Welcome)
    await server.credits(2)
    assert positions(await server.tickets()) == positions(lost)
    assert (await service.ledger.counts()).reissued == 2
    assert await service.ledger.verify() == []


async def test_goodbye_reissues_tickets(server: Peer, service: BufferService, config: RunConfig) -> None:
    await server.join(credits=3)
    kept, *left = await server.tickets()
    await server.send(announced(answered(kept)), encode(answered(kept)))
    await server.send(m.ServerGoodbye(incarnation="of another process"))
    await server.send(m.ServerGoodbye(incarnation="i1"))
    assert (await server.receive(m.Acknowledge)).outcomes == {kept.id: "ready"}
    async with connected(config, "other") as other:
        await other.join(credits=2)
        assert positions(await other.tickets()) == positions(left)
        assert list(service.fleet.servers) == [b"other"]
    assert await service.ledger.verify() == []


async def test_repeated_hello_keeps_server_state(
    server: Peer, service: BufferService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.join(credits=2)
    tickets = await server.tickets()
    known = dict(service.fleet.servers)
    monkeypatch.setattr(service.ledger, "join", None)  # not called
    for _ in range(3):
        await server.hello()
        await server.receive(m.Welcome)
    assert service.fleet.servers[b"r0"] is known[b"r0"]
    await server.credits(3)
    assert len(await server.tickets()) == 1
    assert set((await server.deliver(*map(answered, tickets))).values()) == {"ready"}


async def test_repeated_hello_repeats_eval_drained(server: Peer, service: BufferService) -> None:
    await server.join()
    await start_evaluation(server, service)
    await server.hello()
    await server.receive(m.Welcome)
    assert (await server.receive(m.EvalDrained)).version == 0


async def test_lost_tickets_are_reissued(server: Peer, service: BufferService, monkeypatch: pytest.MonkeyPatch) -> None:
    await server.join(credits=3)
    sent = await server.tickets()
    await server.credits(3, held=[sent[0].id])
    assert (await server.state()).counts.reissued == 0
    monkeypatch.setattr(fleet_module, "GRACE_S", 0.0)
    await server.credits(3, held=[sent[0].id])
    again = await server.tickets()
    assert positions(again) == positions(sent[1:])
    assert await server.deliver(answered(sent[1])) == {sent[1].id: "void"}
    assert await service.ledger.verify() == []


async def test_lost_slice_is_reissued(server: Peer, service: BufferService, monkeypatch: pytest.MonkeyPatch) -> None:
    await server.join()
    first, second = await start_evaluation(server, service)
    await server.state()  # both `credits` with nothing held were handled before the grace period ends
    monkeypatch.setattr(fleet_module, "GRACE_S", 0.0)
    await server.credits(50, held=[first.id])
    (again,) = await server.tickets()
    assert (again.indices, again.id) == (second.indices, f"{second.id}-2"), "a new ticket"


@pytest.mark.parametrize("malformed", [False, True], ids=["failed", "malformed"])
async def test_failed_slice_is_reissued(server: Peer, service: BufferService, malformed: bool) -> None:
    await server.hello(eval_tasks=50)
    await server.receive(m.Welcome)
    (first,) = await start_evaluation(server, service)
    if malformed:
        for attempt in range(MALFORMED_RETRIES + 1):
            if attempt:
                assert (await server.receive(m.Acknowledge)).outcomes == {first.id: m.AGAIN}
            await server.send(m.Deliver(ids=[first.id]), b"garbage")
    else:
        await server.send(m.GroupFailed(id=first.id, kind=m.EVAL, reason="env_error", detail="its env broke", tokens=0))
    assert (await server.receive(m.Acknowledge)).outcomes == {first.id: "filtered"}
    (again,) = await server.tickets()
    assert again.indices == first.indices


async def test_filtered_group_is_counted(make_config: MakeConfig) -> None:
    config = make_config(filters=[{"name": "dynamic_sampling"}])
    async with serving(config) as service, connected(config) as server:
        await server.join(credits=2)
        useless, useful = await server.tickets()
        await server.credits(0, held=[useless.id, useful.id])
        group = answered(useful)
        group.trajectories[0] = msgspec.structs.replace(group.trajectories[0], reward=0.0)
        assert await server.deliver(answered(useless)) == {useless.id: "filtered"}
        assert await server.deliver(answered(useless)) == {useless.id: "duplicate"}
        assert await server.deliver(group) == {useful.id: "ready"}
        counts = await service.ledger.counts()
        assert counts.reasons == {"filtered:dynamic_sampling": 1}
        assert counts.answers_dropped == {"dynamic_sampling": 2}
        assert (await service.ledger.snapshot()).tasks == {"solved": 1, "mixed": 1}
        assert await service.ledger.verify() == []
