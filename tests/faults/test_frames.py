"""The real service process under invalid frames: it counts each, keeps its memory use, and goes on."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
import zmq
from redis.asyncio import Redis

from slipstream.buffer.handlers.inspection import Inspector
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import SchemaVersionError, decode, encode
from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.base import Completion, Request, RequestRefused
from tests.buffer.conftest import MakeConfig
from tests.buffer.groups import answered
from tests.buffer.peers import connected, learner, serving, until
from tests.faults.conftest import MakeRunConfig
from tests.faults.frames import VOCABULARY, drops, mutated_messages
from tests.faults.scripted_run import FollowingEngine, scripted_run

FRAMES = 100_000
WARM_UP = 20_000
AT_ONCE = 1000
MOST_GROWTH_BYTES = 16 << 20
"""Most growth of the service after the warm-up: 200 bytes for each of 80,000 messages."""


@contextmanager
def service_process(config: RunConfig, folder: Path) -> Iterator[psutil.Process]:
    """The service as a user starts it."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "slipstream.buffer.cli", str(file)]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ))
    try:
        yield psutil.Process(process.pid)
        assert process.poll() is None, (folder / "output").read_text()
    finally:
        process.terminate()
        process.wait(30)


class Attacker:
    """A connected peer that sends invalid messages."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        self._request = 0xBAD

    def send(self, messages: Sequence[list[bytes]]) -> int:
        """Sends them in parts, so that queued messages do not count as growth; the drops so far."""
        dropped = 0
        for start in range(0, len(messages), AT_ONCE):
            for message in messages[start : start + AT_ONCE]:
                self.socket.send_multipart(message)
                while self.socket.poll(0):  # the service forgets a peer that does not read
                    self.socket.recv_multipart()
            dropped = self.state().counts.dropped_frames
        return dropped

    def state(self) -> m.State:
        """The state after the service has handled every earlier message."""
        self._request += 1
        self.socket.send(encode(m.StateRequest(request=self._request)))
        while self.socket.poll(60_000):
            try:
                reply = decode(self.socket.recv(), m.ToServer | m.ToLearner)
            except SchemaVersionError:  # the refusal of a frame with another version
                continue
            if isinstance(reply, m.State) and reply.request == self._request:
                return reply
        raise AssertionError("no answer within 60 s")


@contextmanager
def attacker(config: RunConfig, hello: m.ServerHello) -> Iterator[Attacker]:
    """A peer that has joined the run, so its messages take effect."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, b"attacker")
        socket.connect(config.buffer.endpoint)
        socket.send(encode(hello))
        assert socket.poll(60_000), "the service did not come up"
        assert isinstance(decode(socket.recv(), m.ToServer), m.Welcome)
        yield Attacker(socket)


def hello_of(config: RunConfig, *, incarnation: str = "i1") -> m.ServerHello:
    """The hello of the golden frames, so that a damaged copy may still be valid."""
    return m.ServerHello(
        run=config.run.name, env="digits", env_fingerprint="e1", train_tasks=900, eval_tasks=100,
        tokenizer_fingerprint="t1", vocab_size=VOCABULARY, incarnation=incarnation,
    )  # fmt: skip


@pytest.mark.timeout(300)
async def test_bad_frames_are_counted_without_memory_growth(
    make_config: MakeConfig, redis: Redis, tmp_path: Path
) -> None:
    # The attacker may send no valid heartbeat, and must stay known until the end.
    config = make_config(server_deadline_s=600.0)
    inspector = Inspector(config)
    messages = list(mutated_messages(FRAMES, seed=7, run=config.run.name))
    with service_process(config, tmp_path) as process, attacker(config, hello_of(config)) as peer:
        peer.send(messages[:WARM_UP])
        before_bytes = process.memory_info().rss
        assert peer.send(messages[WARM_UP:]) == sum(drops(each, inspector) for each in messages)
        assert process.memory_info().rss - before_bytes < MOST_GROWTH_BYTES
        # The attacker's tickets return; then a group is delivered as usual.
        peer.socket.send(encode(hello_of(config, incarnation="another")))
        peer.state()
        async with connected(config) as server, learner(config) as trainer:
            # One of its messages may have been a learner's hello, whose weights are still to be published.
            state = await asyncio.to_thread(trainer.hello, 0, undo=True)
            version = (await asyncio.to_thread(trainer.published, state.version + 1, evaluate=False)).version
            await server.send(hello_of(config))
            await server.receive(m.Welcome)
            await server.credits(1, version=version)
            (ticket,) = await server.tickets()
            assert await server.deliver(answered(ticket)) == {ticket.id: "ready"}
    assert await Ledger(redis, config).verify() == []


async def test_server_limit_refuses_until_others_fall_silent(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.handlers.rollout.MAX_SERVERS", 3)
    config = make_config(server_deadline_s=2)
    async with serving(config) as service, AsyncExitStack() as stack:
        for number in range(3):
            await (await stack.enter_async_context(connected(config, f"r{number}"))).join()
        fourth = await stack.enter_async_context(connected(config, "fourth"))
        await fourth.hello()
        assert "3 servers already" in (await fourth.receive(m.Refused)).reason

        async def all_silent() -> bool:
            return not service.fleet.servers

        await until(all_silent)
        await fourth.join()
        assert len(service.fleet.servers) == 1


class RefusingEngine(FollowingEngine):
    """Refuses every request with a long detail that has an unencodable character."""

    async def generate(self, request: Request) -> list[Completion]:
        raise RequestRefused("\ud800" * 10 * m.DETAIL_CHARACTERS)


async def test_failure_with_long_undecodable_detail_is_counted(
    make_run_config: MakeRunConfig, redis: Redis, model: Path
) -> None:
    config = make_run_config()
    ledger = Ledger(redis, config)
    async with scripted_run(config, model, RefusingEngine()):

        async def counted() -> bool:
            return (await ledger.counts()).reasons.get("filtered:request_refused", 0) > 0

        await until(counted)
    assert await ledger.verify() == []
