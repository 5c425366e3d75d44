"""Encrypted connections: peers need the run's keys."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import pytest
import zmq.asyncio

from slipstream.buffer.client import GroupReader
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.auth import BUFFER, LEARNER, ROLLOUT, client_keys
from slipstream.buffer.wire.codec import encode
from slipstream.buffer.wire.sockets import connect_dealer
from slipstream.configs import RunConfig
from slipstream.configs.load import dump_config
from slipstream.configs.runtime.errors import CERTAIN, DeadlineError
from slipstream.configs.schema.weights import SecurityConfig
from slipstream.tools.keys import make_keys
from slipstream.tools.launch.redis import redis_command, wait_until_ready
from tests.buffer.conftest import MakeConfig
from tests.buffer.groups import answered, train_group
from tests.buffer.peers import Peer, learner, until
from tests.buffer.test_cli import buffer, wait_until_it_serves
from tests.conftest import free_port


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> RunConfig:
    """A run with keys."""
    make_keys(tmp_path / "keys")
    return with_keys(make_config(), tmp_path / "keys")


@pytest.fixture
def strangers(make_config: MakeConfig, tmp_path: Path) -> list[RunConfig]:
    """The run without keys and with others, and a short reply deadline."""
    make_keys(tmp_path / "others")
    return [with_keys(make_config(reply_deadline_s=0.5), keys) for keys in (None, tmp_path / "others")]


def with_keys(config: RunConfig, folder: Path | None) -> RunConfig:
    return config.model_copy(update={"security": SecurityConfig(keys=folder)})


@contextlib.asynccontextmanager
async def rollout_server(config: RunConfig, name: str = "r0", *, key: str = ROLLOUT) -> AsyncIterator[Peer]:
    """A connection with the key of a rollout server, or another one."""
    context = zmq.asyncio.Context()
    try:
        keys = client_keys(config.security, key, service=BUFFER)
        yield Peer(config, name, connect_dealer(context, config.buffer.endpoint, identity=name, keys=keys))
    finally:
        context.destroy(linger=0)


async def test_peers_without_keys_are_refused(
    config: RunConfig, strangers: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.client.RESEND_S", 0.05)
    log = config.paths.logs / "buffer.jsonl"
    with buffer(config, tmp_path) as process:
        await asyncio.to_thread(wait_until_it_serves, config, process)
        async with rollout_server(config) as server:
            await server.join(credits=4)
            (first, *_) = await server.tickets()
            for stranger in strangers:
                async with rollout_server(stranger, "intruder") as intruder, learner(stranger) as client:
                    intruder.socket.setsockopt(zmq.SNDTIMEO, 0)
                    with contextlib.suppress(zmq.Again):  # refused already
                        await intruder.hello()
                        await intruder.credits(4)
                        await intruder.send(m.Deliver(ids=[first.id]), encode(train_group(first.id)))
                    with pytest.raises(DeadlineError, match=r"LeaseRequest.*security\.keys"):
                        await asyncio.to_thread(client.lease, 0, count=1, consuming_version=0, wait_s=0.1)
                    with pytest.raises(DeadlineError, match=r"security\.keys"):
                        await asyncio.to_thread(client.state)
                    assert not await intruder.socket.poll(0)
            async with learner(config) as client:
                counts = (await asyncio.to_thread(client.state)).counts
            assert (counts.issued, counts.in_flight) == (4, 4)
            await until(lambda: contains(log, "handshake refused"))


LEARNER_COMMANDS: list[m.Message] = [
    m.LearnerHello(request=7, incarnation="thief", run="run", step=0),
    m.LeaseRequest(request=7, incarnation="a1", step=0, count=1, consuming_version=0, wait_s=0.0),
    m.Trained(request=7, incarnation="a1", step=0), m.Published(request=7, incarnation="a1", version=9, evaluate=True),
    m.Throttle(request=7, incarnation="a1", max_staleness=0), m.Checkpointed(request=7, incarnation="a1", step=9),
    m.Finish(request=7, incarnation="a1"), m.StateRequest(request=7),
]  # fmt: skip


async def test_each_key_allows_the_messages_of_its_role(config: RunConfig, tmp_path: Path) -> None:
    assert {type(command) for command in LEARNER_COMMANDS} == set(get_args(m.FromLearner))
    with buffer(config, tmp_path) as process:
        await asyncio.to_thread(wait_until_it_serves, config, process)
        async with rollout_server(config) as server, learner(config) as client:
            before = await asyncio.to_thread(client.hello, 0)
            await server.join(credits=4)
            groups = [answered(ticket) for ticket in await server.tickets()]
            for command in LEARNER_COMMANDS:
                await server.send(command)
                assert (await server.receive(m.Refused, among=m.ToLearner)).request == 7
            state = await asyncio.to_thread(client.state)  # it is still the run's learner
            assert (state.version, state.counts.in_flight) == (before.version, 4)
            assert state.counts.dropped_frames == len(LEARNER_COMMANDS)
            await server.deliver(*groups)
            leased = await asyncio.to_thread(client.lease, 0, count=4, consuming_version=0, wait_s=10.0)
            assert leased is not None
            assert GroupReader(config.redis, run=config.run.name).read(leased.ids) == groups
        async with rollout_server(config, key=LEARNER) as other:
            await other.hello()
            await other.receive(m.Refused)


def test_missing_key_fails_service_start(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "keys" / "rollout.key").unlink()
    with buffer(config, tmp_path) as process:
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == CERTAIN
    assert str(tmp_path / "keys" / "rollout.key") in stderr
    assert "slipstream keys new" in stderr
    assert "Traceback" not in stderr


def test_secrets_are_not_logged(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_REDIS_PASSWORD", "right")
    embedded = config.redis.model_copy(update={"url": None, "port": free_port()})
    config = config.model_copy(update={"redis": embedded})
    command = redis_command(config.redis, config.paths.redis)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until_ready(config.redis, 20)
            monkeypatch.setenv("SLIPSTREAM_REDIS_PASSWORD", "hunter2")
            with buffer(config, tmp_path) as process:
                _, stderr = process.communicate(timeout=30)
                assert process.returncode == 1
        finally:
            server.kill()
    assert "SLIPSTREAM_REDIS_PASSWORD" in stderr
    secrets = [
        file.read_text().partition("secret-key")[2].strip(' ="\n') for file in (tmp_path / "keys").glob("*_secret")
    ]
    assert len(secrets) == 3
    written = [stderr, dump_config(config), *(file.read_text() for file in config.paths.logs.iterdir())]
    assert [secret for secret in ["hunter2", *secrets] for text in written if secret in text] == []


async def contains(file: Path, text: str) -> bool:
    return text in file.read_text(encoding="utf-8")
