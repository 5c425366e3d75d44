"""Invalid messages and misbehaving peers: the service drops and counts them, and serves the others."""

import asyncio
import threading
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest
import zmq

from slipstream.buffer.handlers.rollout import MALFORMED_RETRIES
from slipstream.buffer.service import BufferService
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from tests.buffer.conftest import MakeConfig
from tests.buffer.groups import answered, train_group, trajectory
from tests.buffer.peers import PATIENCE_S, Peer, connected, serving, until


async def assert_serves(server: Peer) -> None:
    """A group is delivered."""
    await server.join(credits=1)
    (ticket,) = await server.tickets()
    assert await server.deliver(answered(ticket)) == {ticket.id: "ready"}


async def test_incomplete_messages_are_dropped(server: Peer) -> None:
    await server.join(credits=2)
    first, second = await server.tickets()
    await server.socket.send_multipart([b""])
    await server.socket.send_multipart([b"", b"", b""])
    await server.send(m.Deliver(ids=[first.id, second.id]), encode(answered(first)))
    counts = (await server.state()).counts
    assert (counts.dropped_frames, counts.in_flight, counts.ready) == (3, 2, 0)


async def test_malformed_groups_are_retried_then_filtered(server: Peer) -> None:
    await server.join(credits=3)
    first, second, third = await server.tickets()
    await server.credits(0)
    await server.send(
        m.Deliver(ids=[first.id, second.id, third.id]), encode(answered(first)), b"garbage", encode(answered(first)),
    )  # fmt: skip
    outcomes = (await server.receive(m.Acknowledge)).outcomes
    assert outcomes == {first.id: "ready", second.id: m.AGAIN, third.id: m.AGAIN}
    assert await server.deliver(answered(second)) == {second.id: "ready"}
    for _ in range(MALFORMED_RETRIES - 1):
        await server.send(m.Deliver(ids=[third.id]), b"garbage")
        assert (await server.receive(m.Acknowledge)).outcomes == {third.id: m.AGAIN}
    await server.send(m.Deliver(ids=[third.id]), b"garbage")
    assert (await server.receive(m.Acknowledge)).outcomes == {third.id: "filtered"}
    counts = (await server.state()).counts
    assert (counts.ready, counts.reasons, counts.dropped_frames) == (2, {"filtered:malformed": 1}, 5)


LAYOUT = m.ExpertLayout(layers=1, per_token=2, experts=4)
POISON: dict[str, dict[str, Any]] = {
    "token_out_of_vocabulary": {"token_ids": np.array([1, 2, 32, 4], dtype=m.TOKEN_DTYPE).tobytes()},
    "invalid_logprob": {"behaviour_logprobs": np.array([0, 0, 0.5, -1], dtype=m.LOGPROB_DTYPE).tobytes()},
    "uncovered_action": {"spans": [m.VersionSpan(version=0, start=2, end=3)]},
    "invalid_experts": {"routed_experts": m.RoutedExperts(layout=LAYOUT, ids=bytes([3, 0, 4, 1]))},
    "future_version": {"spans": [m.VersionSpan(version=8, start=2, end=4)]},
}
"""What would end the learner, by the reason code of its refusal."""


def poisoned(ticket: m.Ticket, reason: str, **fields: Any) -> m.Group:
    """The group of a ticket whose second answer can't be trained on."""
    group = answered(ticket)
    first, second = group.trajectories
    second = msgspec.structs.replace(second, **(POISON[reason] | fields))
    return msgspec.structs.replace(group, trajectories=[first, second])


@pytest.mark.parametrize("reason", POISON)
async def test_untrainable_group_is_filtered(server: Peer, service: BufferService, reason: str) -> None:
    await service.ledger.publish(7, evaluate=False)
    await server.join(credits=2, version=7)
    ticket, other = await server.tickets()
    await server.credits(0)
    for outcome in [m.AGAIN] * MALFORMED_RETRIES + ["filtered"]:
        assert await server.deliver(poisoned(ticket, reason)) == {ticket.id: outcome}
    assert await server.deliver(answered(other)) == {other.id: "ready"}
    counts = (await server.state()).counts
    assert (counts.ready, counts.reasons) == (1, {f"filtered:{reason}": 1})
    assert counts.dropped_frames == MALFORMED_RETRIES + 1
    assert await service.ledger.verify() == []


LONG = np.ones(1026, dtype=m.MASK_DTYPE)
LONG[0] = 0
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "other_ticket": {"indices": [10]}, "other_ticket, epoch": {"epoch": 1}, "other_ticket, kind": {"kind": m.EVAL},
    "wrong_episodes": {"trajectories": [trajectory(), trajectory(episode=1), trajectory(episode=2)]},
    "invalid_reward": {"trajectories": [trajectory(), trajectory(reward=1e15, episode=1)]},
    "answer_too_long": {
        "trajectories": [
            trajectory(),
            msgspec.structs.replace(
                trajectory(episode=1), token_ids=LONG.astype(m.TOKEN_DTYPE).tobytes(), action_mask=LONG.tobytes(),
                behaviour_logprobs=(-0.5 * LONG).astype(m.LOGPROB_DTYPE).tobytes(),
                spans=[m.VersionSpan(version=0, start=1, end=1026)],
            ),
        ]
    },
}  # fmt: skip
"""What contradicts a ticket, by the reason code of its refusal."""


@pytest.mark.parametrize("reason", CONTRADICTIONS)
async def test_group_that_contradicts_its_ticket_is_filtered(server: Peer, service: BufferService, reason: str) -> None:
    await server.join(credits=2)
    ticket, other = await server.tickets()
    await server.credits(0)
    group = msgspec.structs.replace(answered(ticket), **CONTRADICTIONS[reason])
    for outcome in [m.AGAIN] * MALFORMED_RETRIES + ["filtered"]:
        assert await server.deliver(group, answered(other)) == {ticket.id: outcome, other.id: ANY}
    counts = (await server.state()).counts
    assert (counts.ready, counts.reasons) == (1, {f"filtered:{reason.partition(',')[0]}": 1})
    assert counts.dropped_frames == MALFORMED_RETRIES + 1
    assert await service.ledger.verify() == []


async def test_ticket_is_known_after_a_restart_of_the_service(config: RunConfig) -> None:
    async with serving(config), connected(config) as server:
        await server.join(credits=2)
        first, second = await server.tickets()
    async with serving(config), connected(config) as server:
        await server.hello()
        await server.receive(m.Welcome)
        await server.credits(0, held=[first.id, second.id])
        swapped = msgspec.structs.replace(answered(first), indices=second.indices)
        assert await server.deliver(swapped, answered(second)) == {first.id: m.AGAIN, second.id: "ready"}
        assert await server.deliver(answered(first)) == {first.id: "ready"}


async def test_dropped_group_of_another_task_is_no_outcome(make_config: MakeConfig) -> None:
    """Else the curriculum would skip a task that nobody answered."""
    config = make_config(filters=[{"name": "dynamic_sampling"}])
    async with serving(config) as service, connected(config) as server:
        await server.join(credits=1)
        (ticket,) = await server.tickets()
        (task,) = ticket.indices
        other = msgspec.structs.replace(answered(ticket), indices=[(task + 1) % 10])
        for outcome in [m.AGAIN] * MALFORMED_RETRIES + ["filtered"]:
            assert await server.deliver(other) == {ticket.id: outcome}
        snapshot = await service.ledger.snapshot()
        assert (snapshot.counts.reasons, snapshot.tasks) == ({"filtered:other_ticket": 1}, {})


async def test_negative_token_id_is_refused(server: Peer) -> None:
    await server.join(credits=1)
    (ticket,) = await server.tickets()
    negative = np.array([1, 2, -1, 4], dtype=m.TOKEN_DTYPE).tobytes()
    group = poisoned(ticket, "token_out_of_vocabulary", token_ids=negative)
    assert await server.deliver(group) == {ticket.id: m.AGAIN}


async def test_untrainable_answer_fails_eval_slice(server: Peer, service: BufferService) -> None:
    await service.ledger.publish(0, evaluate=True)
    service.fleet.evaluating = 0
    await service.ledger.finish()  # no train tickets
    await server.join(credits=50)
    ticket = (await server.tickets())[0]
    await server.receive(m.EvalDrained)
    group = answered(ticket)
    out = msgspec.structs.replace(group.trajectories[0], **POISON["token_out_of_vocabulary"])
    group = msgspec.structs.replace(group, trajectories=[out, *group.trajectories[1:]])
    for outcome in [m.AGAIN] * MALFORMED_RETRIES + ["filtered"]:
        assert await server.deliver(group) == {ticket.id: outcome}


@pytest.mark.parametrize("excess", [{"missing": 1 << 62}, {"missing": -1}, {"greedy_reward": 1e300}])
async def test_group_with_number_out_of_range_is_malformed(server: Peer, excess: dict[str, Any]) -> None:
    await server.join(credits=1)
    (ticket,) = await server.tickets()
    assert await server.deliver(msgspec.structs.replace(answered(ticket), **excess)) == {ticket.id: m.AGAIN}
    assert await server.deliver(answered(ticket)) == {ticket.id: "ready"}


@pytest.mark.parametrize("reward", [float("nan"), 1.7e308])
async def test_eval_scores_need_finite_sum(server: Peer, service: BufferService, reward: float) -> None:
    await service.ledger.publish(0, evaluate=True)
    service.fleet.evaluating = 0
    await service.ledger.finish()  # no train tickets
    await server.join(credits=50)
    ticket = (await server.tickets())[0]
    await server.receive(m.EvalDrained)
    assert await server.deliver(answered(ticket, reward=reward)) == {ticket.id: m.AGAIN}
    assert (await server.state()).counts.dropped_frames == 1
    assert await server.deliver(answered(ticket)) == {ticket.id: "evaluated"}


def eval_group(*, indices: list[int], rewards: list[float]) -> m.Group:
    answers = [trajectory(reward=reward, episode=number) for number, reward in enumerate(rewards)]
    return m.Group(id="e0-0", kind=m.EVAL, epoch=0, indices=indices, trajectories=answers)


@pytest.mark.parametrize(
    "group",
    [
        train_group("unknown"), train_group("e0-0"), train_group("1", versions=()),
        m.Group(id="1", kind=m.TRAIN, epoch=0, indices=[0], trajectories=[]), eval_group(indices=[], rewards=[1.0]),
        eval_group(indices=[0, 1], rewards=[1.0]), eval_group(indices=[-1], rewards=[1.0]),
        eval_group(indices=[0], rewards=[float("nan")]), eval_group(indices=[0], rewards=[float("inf")]),
        eval_group(indices=[0, 1], rewards=[1.7e308, 1.7e308]),
    ],
    ids=["strange id", "evaluation's id", "no action token", "empty", "eval of nothing", "eval with missing answers",
         "eval of no task", "nan", "inf", "infinite sum"],
)  # fmt: skip
async def test_unrequested_group_is_void(server: Peer, group: m.Group) -> None:
    await server.join()
    assert await server.deliver(group) == {group.id: "void"}
    await assert_serves(server)


@pytest.mark.parametrize(
    "message",
    [
        m.ServerHello(
            run="run", env="digits", env_fingerprint="e1", train_tasks=10**8 + 1, eval_tasks=100,
            tokenizer_fingerprint="t1", vocab_size=32, incarnation="i1",
        ),
        m.Credits(capacity=1 << 62, status=m.ServerStatus(version=1 << 62), held=[]),
        m.Credits(capacity=-1, status=m.ServerStatus(), held=[]),
        m.GroupFailed(id="1", kind=m.TRAIN, reason="broken", detail="", tokens=1 << 62),
        m.LeaseRequest(request=1, incarnation="a1", step=0, count=1 << 62, consuming_version=0, wait_s=0.0),
        m.LeaseRequest(request=1, incarnation="a1", step=0, count=-1, consuming_version=0, wait_s=0.0),
        m.Published(request=1, incarnation="a1", version=1 << 62, evaluate=True),
        m.Trained(request=1, incarnation="a1", step=-1),
    ],
)  # fmt: skip
async def test_message_with_number_out_of_range_is_dropped(server: Peer, message: m.Message) -> None:
    await server.join()
    await server.send(message)
    assert (await server.state()).counts.dropped_frames == 1
    await assert_serves(server)


async def test_peer_identity_may_be_any_bytes(service: BufferService, config: RunConfig) -> None:
    async with connected(config, b"\xff\xfe\x80") as server:
        await assert_serves(server)


async def test_flooding_peer_does_not_block_others(server: Peer, config: RunConfig) -> None:
    stop = threading.Event()

    def flood() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(config.buffer.endpoint)
            while not stop.is_set():
                if socket.poll(100, zmq.POLLOUT):
                    socket.send(b"garbage")

    flooding = asyncio.create_task(asyncio.to_thread(flood))
    try:
        await assert_serves(server)
    finally:
        stop.set()
        await flooding


async def test_non_reading_peer_does_not_block_others(make_config: MakeConfig, tmp_path: Path) -> None:
    requests = 2000
    # Not TCP: with a receive buffer this small the kernel drops the window updates, and the peer's requests stay away.
    address = f"ipc://{tmp_path}/buffer"
    config = make_config(bind=address, endpoint=address)
    async with serving(config, queue_messages=10) as service, connected(config) as server:
        with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
            reader.setsockopt(zmq.LINGER, 0)
            reader.setsockopt(zmq.RCVHWM, 1)
            reader.setsockopt(zmq.SNDHWM, 0)
            reader.connect(config.buffer.endpoint)
            for _ in range(requests):
                reader.send(encode(m.Credits(capacity=1, status=m.ServerStatus(), held=[])))
            reader.send(b"the last one")
            await assert_serves(server)

            async def all_handled() -> bool:
                return service.malformed.count == 1

            await until(all_handled)


@pytest.mark.parametrize(
    ("message", "request_number"), [(m.ServerGoodbye(incarnation="i"), 0), (m.StateRequest(request=9), 9)]
)
async def test_peer_of_an_older_release_is_refused(
    server: Peer, config: RunConfig, message: m.Message, request_number: int
) -> None:
    older = m.SCHEMA_VERSION - 1
    fields = {**msgspec.msgpack.decode(encode(message)), "v": older}
    fields.pop("incarnation", None)  # a field that an older release lacks
    async with connected(config, "older") as peer:
        await peer.socket.send_multipart([msgspec.msgpack.encode(fields)])
        async with asyncio.timeout(PATIENCE_S):
            refusal = msgspec.msgpack.decode(await peer.socket.recv())
    assert (refusal["type"], refusal["v"], refusal["request"]) == ("Refused", older, request_number)
    assert str(older) in refusal["reason"]
    assert str(m.SCHEMA_VERSION) in refusal["reason"]
    await assert_serves(server)
