"""The learner's client: missing, late and invalid replies, refusals."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import pytest
import structlog
import zmq

from slipstream.buffer.client import BufferClient
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import DeadlineError, RefusedError, StoppedError
from tests.buffer.conftest import MakeConfig
from tests.buffer.peers import learner, serving


@pytest.fixture
def config(make_config: MakeConfig) -> RunConfig:
    """A short reply deadline."""
    return make_config(reply_deadline_s=0.2)


@pytest.fixture
def client(config: RunConfig) -> Iterator[BufferClient]:
    made = BufferClient(config, "learner")
    yield made
    made.close()


@pytest.fixture
def buffer(config: RunConfig) -> Iterator["zmq.Socket[bytes]"]:
    """A bound socket in place of the buffer."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.bind(config.buffer.endpoint)
        yield socket


def state(request: int, *, version: int) -> bytes:
    return encode(m.State(request=request, version=version, counts=m.LedgerCounts(), servers=[], evals=[]))


def answer_once(client: BufferClient, buffer: "zmq.Socket[bytes]") -> None:
    """One request that the buffer answers."""
    asking = threading.Thread(target=client.state)
    asking.start()
    peer, frame = buffer.recv_multipart()
    buffer.send_multipart([peer, state(decode(frame, m.ToService).request, version=1)])
    asking.join()


def test_missing_buffer_is_named(client: BufferClient, config: RunConfig) -> None:
    with pytest.raises(DeadlineError, match=rf"{config.buffer.endpoint} .*StateRequest .*0\.2 s"):
        client.state()


def test_unresolvable_buffer_is_named(make_config: MakeConfig) -> None:
    config = make_config(reply_deadline_s=0.1, endpoint="tcp://nobody.invalid:5555")
    client = BufferClient(config, "learner")
    with pytest.raises(DeadlineError, match=r"5555.*nobody\.invalid.*resolved"):
        client.state()
    client.close()


def test_wait_for_buffer_is_logged(client: BufferClient, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.configs.runtime.logging.WAIT_LOG_AFTER_S", 0.0)
    monkeypatch.setattr("slipstream.buffer.client.RESEND_S", 0.02)
    with structlog.testing.capture_logs() as logs, pytest.raises(DeadlineError):
        client.state()
    assert [(line["event"], line["address"], line["request"]) for line in logs] == [
        ("waiting for the buffer", config.buffer.endpoint, "StateRequest")
    ]


def test_known_buffer_is_waited_for_until_give_up(
    client: BufferClient, config: RunConfig, buffer: "zmq.Socket[bytes]"
) -> None:
    answer_once(client, buffer)
    stopped = threading.Event()

    def ask_until_stopped() -> None:
        with pytest.raises(StoppedError):
            client.state()
        stopped.set()

    waiting = threading.Thread(target=ask_until_stopped)
    waiting.start()
    waiting.join(3 * config.buffer.reply_deadline_s)
    assert waiting.is_alive()
    client.give_up()
    waiting.join(60)
    assert stopped.is_set()


def test_stopping_client_waits_briefly(
    config: RunConfig, buffer: "zmq.Socket[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.client.STOPPING_REPLY_S", 0.1)
    stopping = threading.Event()
    with closing(BufferClient(config, "learner", is_stopping=stopping.is_set)) as client:
        answer_once(client, buffer)
        stopping.set()
        with pytest.raises(DeadlineError, match=r"StateRequest .*0\.1 s"):
            client.state()


def test_lease_wait_extends_deadline(client: BufferClient, config: RunConfig, buffer: "zmq.Socket[bytes]") -> None:
    with pytest.raises(DeadlineError, match=rf"{config.buffer.endpoint} .*LeaseRequest .*0\.3 s"):
        client.lease(0, count=1, consuming_version=0, wait_s=0.1)
    _, frame = buffer.recv_multipart()
    assert isinstance(decode(frame, m.ToService), m.LeaseRequest)


async def test_late_reply_is_discarded(client: BufferClient, buffer: "zmq.Socket[bytes]") -> None:
    with pytest.raises(DeadlineError):
        client.state()
    peer, first = buffer.recv_multipart()
    buffer.send_multipart([peer, state(decode(first, m.ToService).request, version=1)])
    asking = asyncio.create_task(asyncio.to_thread(client.state))
    _, second = await asyncio.to_thread(buffer.recv_multipart)
    buffer.send_multipart([peer, state(decode(second, m.ToService).request, version=2)])
    assert (await asking).version == 2


async def test_evaluations_are_reported_once(make_config: MakeConfig, buffer: "zmq.Socket[bytes]") -> None:
    with closing(BufferClient(make_config(), "learner")) as client:

        async def heard(ask: Callable[[], m.State], *evaluated: int) -> list[int]:
            asking = asyncio.create_task(asyncio.to_thread(ask))
            peer, frame = await asyncio.to_thread(buffer.recv_multipart)
            reports = [
                m.EvalReport(version=version, score=1.0, tasks=8, failures={}, eval_s=0.1, group_ids=[])
                for version in evaluated
            ]
            answer = decode(state(decode(frame, m.ToService).request, version=3), m.State)
            buffer.send_multipart([peer, encode(msgspec.structs.replace(answer, evals=reports))])
            await asking
            return [report.version for report in client.take_evals()]

        assert await heard(lambda: client.hello(0), 0, 1) == []
        assert await heard(client.state, 0, 1, 2) == [2]
        assert await heard(client.state, 1, 2, 3) == [3]


async def test_garbage_from_buffer_is_an_error(client: BufferClient, buffer: "zmq.Socket[bytes]") -> None:
    asking = asyncio.create_task(asyncio.to_thread(client.state))
    peer, _ = await asyncio.to_thread(buffer.recv_multipart)
    buffer.send_multipart([peer, b"garbage"])
    with pytest.raises(FrameError):
        await asking


async def test_learner_of_other_run_is_refused(make_config: MakeConfig) -> None:
    config = make_config()
    other = config.model_copy(update={"run": config.run.model_copy(update={"name": "somebody-else"})})
    async with serving(config), learner(other) as client:
        with pytest.raises(RefusedError, match=f"{config.run.name}.*somebody-else"):
            await asyncio.to_thread(client.hello, 0)


async def test_unanswered_request_is_resent(
    client: BufferClient, buffer: "zmq.Socket[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.client.RESEND_S", 0.01)
    with pytest.raises(DeadlineError):
        client.state()
    _, first = buffer.recv_multipart()
    _, again = buffer.recv_multipart()
    assert again == first
