"""Sockets: encryption keys, refused handshakes, size limits."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import zmq
import zmq.asyncio
from structlog.typing import EventDict

from slipstream.buffer.wire.auth import (
    BUFFER,
    CLIENTS,
    LEARNER,
    LOG_EVERY_S,
    ROLLOUT,
    HandshakeRefusals,
    Refusal,
    client_keys,
    proven_name,
    secret_file,
    service_keys,
)
from slipstream.buffer.wire.sockets import bind_router, connect_dealer
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.weights import SecurityConfig
from slipstream.tools.keys import make_keys
from tests.conftest import free_port
from tests.ipv6 import needs_ipv6

PATIENCE_MS = 20_000

Socket = zmq.Socket[bytes]
PLAIN = SecurityConfig()


@pytest.fixture
def keys(tmp_path: Path) -> SecurityConfig:
    return made(tmp_path / "keys")


@pytest.fixture
def key_sets(keys: SecurityConfig, tmp_path: Path) -> dict[str, SecurityConfig]:
    """Keys by their defect."""
    others = made(tmp_path / "others")
    return {
        "none": keys, "no keys": PLAIN, "another client key": mixed(tmp_path / "1", service=keys, client=others),
        "another service key": mixed(tmp_path / "2", service=others, client=keys),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("endpoint", "warnings"), [("tcp://learner-host:5556", 1), ("tcp://127.0.0.1:5556", 0), (None, 0)]
)
def test_loopback_bind_with_remote_endpoint_is_warned(endpoint: str | None, warnings: int) -> None:
    context: zmq.Context[Socket] = zmq.Context()
    with structlog.testing.capture_logs() as logs:
        address = f"tcp://127.0.0.1:{free_port()}"
        bind_router(context, address, max_message_bytes=1 << 16, endpoint=endpoint).close()
    context.destroy(linger=0)
    assert [line["endpoint"] for line in logs] == [endpoint] * warnings


@dataclass
class Wire:
    """Two processes' sockets at one address."""

    address: str
    near: "zmq.Context[Socket]" = field(default_factory=zmq.Context)
    far: "zmq.Context[Socket]" = field(default_factory=zmq.Context)
    sockets: list[Socket] = field(default_factory=list)

    def router(self, security: SecurityConfig, *, max_message_bytes: int = 1 << 20) -> Socket:
        keys = service_keys(security, BUFFER)
        self.sockets.append(bind_router(self.near, self.address, max_message_bytes=max_message_bytes, keys=keys))
        return self.sockets[-1]

    def dealer(self, identity: str, security: SecurityConfig, *, key: str = ROLLOUT, **options: Any) -> Socket:
        keys = client_keys(security, key, service=BUFFER)
        self.sockets.append(connect_dealer(self.far, self.address, identity=identity, keys=keys, **options))
        return self.sockets[-1]


@pytest.fixture
def wire(free_address: str) -> Iterator[Wire]:
    wire = Wire(free_address)
    yield wire
    wire.far.destroy(linger=0)
    wire.near.destroy(linger=0)


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    with structlog.testing.capture_logs() as records:
        yield records


def made(folder: Path) -> SecurityConfig:
    make_keys(folder)
    return SecurityConfig(keys=folder)


def mixed(folder: Path, *, service: SecurityConfig, client: SecurityConfig) -> SecurityConfig:
    """A client's folder with the service's public key of one run and the client keys of another."""
    assert service.keys is not None and client.keys is not None, "made above"
    folder.mkdir()
    (folder / "buffer.key").write_bytes((service.keys / "buffer.key").read_bytes())
    (folder / "rollout.key_secret").write_bytes((client.keys / "rollout.key_secret").read_bytes())
    return SecurityConfig(keys=folder)


def arrives(router: Socket) -> bytes:
    assert router.poll(PATIENCE_MS), "nothing arrived"
    frame: bytes = router.recv_multipart()[1]
    return frame


def try_send(dealer: Socket) -> None:
    """Sends without blocking: a refused dealer would block forever."""
    with contextlib.suppress(zmq.Again):
        dealer.send(b"refused", flags=zmq.NOBLOCK)


def until_refused(logs: list[EventDict], *codes: Refusal, times: int = 1) -> list[EventDict]:
    """Refusals in the log, once that many have one of the codes."""
    give_up = time.monotonic() + PATIENCE_MS / 1000
    while time.monotonic() < give_up:
        refusals = [record for record in list(logs) if record["event"] == "handshake refused"]
        found = [record for record in refusals if record["code"] in codes]
        if len(found) >= times:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{codes} not in {logs}")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=needs_ipv6)])
def test_messages_with_keys_pass_both_ways(wire: Wire, keys: SecurityConfig, host: str) -> None:
    wire.address = f"tcp://{host}:{free_port()}"
    router, dealer = wire.router(keys), wire.dealer("r0", keys)
    dealer.send(b"question")
    assert arrives(router) == b"question"
    router.send_multipart([b"r0", b"answer"])
    assert dealer.poll(PATIENCE_MS)
    assert dealer.recv() == b"answer"


@pytest.mark.parametrize("key", [LEARNER, ROLLOUT])
def test_service_sees_the_key_of_each_message(wire: Wire, keys: SecurityConfig, key: str) -> None:
    router = wire.router(keys)
    wire.dealer("r0", keys, key=key).send(b"message")
    assert router.poll(PATIENCE_MS)
    assert {proven_name(frame) for frame in router.recv_multipart(copy=False)} == {key}


def test_service_without_keys_sees_no_key(wire: Wire) -> None:
    router = wire.router(PLAIN)
    wire.dealer("r0", PLAIN).send(b"message")
    assert router.poll(PATIENCE_MS)
    assert {proven_name(frame) for frame in router.recv_multipart(copy=False)} == {None}


def test_client_without_queue_sends_only_when_connected(wire: Wire) -> None:
    queueing, other = wire.dealer("r0", PLAIN), wire.dealer("r1", PLAIN, queue_offline=False)
    queueing.send(b"early", flags=zmq.NOBLOCK)
    with pytest.raises(zmq.Again):
        other.send(b"early", flags=zmq.NOBLOCK)
    router = wire.router(PLAIN)
    assert other.poll(PATIENCE_MS, zmq.POLLOUT)
    other.send(b"now", flags=zmq.NOBLOCK)
    assert {arrives(router), arrives(router)} == {b"early", b"now"}


@pytest.mark.parametrize(
    ("defect", "service_log", "client_log"),
    [
        # Which of the two disconnects first is a race.
        ("no keys", (Refusal.BROKEN_OFF, Refusal.KEYS_ON_ONE_SIDE), (Refusal.UNFINISHED, Refusal.KEYS_ON_ONE_SIDE)),
        ("another client key", (Refusal.UNKNOWN_CLIENT,), (Refusal.KEY_REFUSED,)),
        ("another service key", (Refusal.OTHER_SERVICE_KEY,), (Refusal.BROKEN_OFF,)),
    ],
)
def test_wrong_keys_are_refused_and_logged_by_both_sides(
    wire: Wire,
    logs: list[EventDict],
    key_sets: dict[str, SecurityConfig],
    defect: str,
    service_log: tuple[Refusal, ...],
    client_log: tuple[Refusal, ...],
) -> None:
    router = wire.router(key_sets["none"])
    try_send(wire.dealer("refused", key_sets[defect]))
    until_refused(logs, *service_log)
    until_refused(logs, *client_log)
    for record in until_refused(logs, *service_log, *client_log, times=2):  # one of each side
        assert record["address"] == wire.address
        assert "security.keys" in record["remedy"]
    wire.dealer("r0", key_sets["none"]).send(b"accepted")
    assert arrives(router) == b"accepted"
    assert not router.poll(0)


def test_keys_on_one_side_only_are_refused(wire: Wire, logs: list[EventDict], keys: SecurityConfig) -> None:
    router = wire.router(PLAIN)
    try_send(wire.dealer("r0", keys))
    until_refused(logs, Refusal.KEYS_ON_ONE_SIDE)
    assert not router.poll(0)


def test_silent_peer_without_keys_is_logged(wire: Wire, logs: list[EventDict]) -> None:
    host, _, port = wire.address.removeprefix("tcp://").rpartition(":")
    with socket.create_server((host, int(port))) as silent:
        wire.dealer("r0", PLAIN)
        silent.accept()[0].close()
        (refusal,) = until_refused(logs, Refusal.UNFINISHED)
    assert "ZeroMQ retries" in refusal["remedy"]


def test_refusals_are_counted_and_logged_rarely(logs: list[EventDict]) -> None:
    now = 100.0
    refusals = HandshakeRefusals("tcp://127.0.0.1:1", clock=lambda: now)
    for _ in range(3):
        refusals.add(Refusal.BROKEN_OFF)
    now += LOG_EVERY_S
    refusals.add(Refusal.BROKEN_OFF)
    assert [record["refused"] for record in logs] == [1, 4]


@pytest.mark.parametrize("encrypted", [False, True])
def test_too_large_frame_disconnects_sender(wire: Wire, keys: SecurityConfig, encrypted: bool) -> None:
    security = keys if encrypted else PLAIN
    router = wire.router(security, max_message_bytes=1 << 16)
    large = wire.dealer("large", security)
    large.send(b"small enough")
    assert arrives(router) == b"small enough"
    large.send(bytes(1 << 17))
    until_gone(router, b"large")
    wire.dealer("r0", security).send(b"accepted")
    assert arrives(router) == b"accepted"
    assert not router.poll(0)


def test_client_refuses_too_large_frame(wire: Wire) -> None:
    router, dealer = wire.router(PLAIN), wire.dealer("r0", PLAIN, max_message_bytes=1 << 16)
    dealer.send(b"hello")
    assert arrives(router) == b"hello"
    router.send_multipart([b"r0", b"fits"])
    assert dealer.poll(PATIENCE_MS)
    assert dealer.recv() == b"fits"
    router.send_multipart([b"r0", bytes(1 << 17)])
    until_gone(router, b"r0")
    assert not dealer.poll(0)


def until_gone(router: Socket, peer: bytes) -> None:
    """Returns once the peer has disconnected."""
    give_up = time.monotonic() + PATIENCE_MS / 1000
    while time.monotonic() < give_up:
        try:
            router.send_multipart([peer, b"?"])
        except zmq.ZMQError as error:
            assert error.errno == zmq.EHOSTUNREACH
            return
        time.sleep(0.01)
    raise AssertionError(f"{peer!r} is still connected")


@pytest.mark.parametrize(
    ("address", "warns"),
    [
        ("tcp://127.0.0.1:*", False), ("tcp://*:*", True), ("tcp://0.0.0.0:*", True), ("inproc://here", False),
        pytest.param("tcp://[::1]:*", False, marks=needs_ipv6), pytest.param("tcp://[::]:*", True, marks=needs_ipv6),
    ],
)  # fmt: skip
def test_public_bind_without_keys_is_warned(
    wire: Wire, logs: list[EventDict], keys: SecurityConfig, address: str, warns: bool
) -> None:
    wire.address = address
    wire.router(PLAIN).close()
    assert [record["log_level"] for record in logs] == ["warning"] * warns
    logs.clear()
    wire.address = address.replace("here", "there")  # an inproc address is not free at once
    wire.router(keys).close()
    assert logs == []


def test_busy_address_is_named(wire: Wire) -> None:
    wire.router(PLAIN)
    with pytest.raises(ConfigError, match=f"can't listen on {wire.address}"):
        wire.router(PLAIN)


def test_monitor_thread_ends_with_socket(wire: Wire, keys: SecurityConfig) -> None:
    name = f"handshakes {wire.address}"
    wire.router(keys).close()
    wire.dealer("r0", keys).close()
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(PATIENCE_MS / 1000)
    assert name not in [thread.name for thread in threading.enumerate()]


def swap_secret(file: Path) -> None:
    """Gives a pair another secret key than its own."""
    _, other = zmq.curve_keypair()
    before, word, _ = file.read_text().partition("secret-key")
    file.write_text(f'{before}{word} = "{other.decode()}"\n')


def read_all(security: SecurityConfig) -> None:
    """Reads the keys of all processes."""
    for service, clients in CLIENTS.items():
        service_keys(security, service)
        for client in clients:
            client_keys(security, client, service=service)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda file: file.unlink(), "there is no {file}"),
        (lambda file: file.write_text("nothing"), "{file} .* holds no public key"),
        (lambda file: file.write_bytes(file.with_suffix(".key").read_bytes()), "{file} .* it holds no secret key"),
        (swap_secret, "{file} .* its secret key does not belong to its public key"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", [BUFFER, LEARNER, ROLLOUT])
def test_invalid_key_file_is_named(
    keys: SecurityConfig, spoil: Callable[[Path], object], complaint: str, name: str
) -> None:
    assert keys.keys is not None, "made above"
    file = secret_file(keys.keys, name)
    secret = file.read_text().partition("secret-key")[2].strip(' ="\n')
    spoil(file)
    with pytest.raises(ConfigError, match=complaint.format(file=file)) as caught:
        read_all(keys)
    assert "slipstream keys new" in str(caught.value)
    assert secret not in str(caught.value)


@pytest.mark.parametrize("name", [BUFFER, LEARNER, ROLLOUT])
def test_invalid_public_key_is_named(keys: SecurityConfig, name: str) -> None:
    assert keys.keys is not None, "made above"
    file = keys.keys / f"{name}.key"
    file.write_text('public-key = "too short"\n')
    with pytest.raises(ConfigError, match=f"{file} .* its public key"):
        read_all(keys)


def test_readable_secret_is_warned(keys: SecurityConfig, logs: list[EventDict]) -> None:
    assert keys.keys is not None, "made above"
    service_keys(keys, BUFFER)
    assert logs == []
    secret_file(keys.keys, BUFFER).chmod(0o640)
    service_keys(keys, BUFFER)
    assert [record["log_level"] for record in logs] == ["warning"]


@pytest.mark.parametrize(("mode", "warnings"), [(0o440, 0), (0o444, 1), (0o460, 1)])
def test_secret_of_another_user_is_read_by_the_group(
    mode: int, warnings: int, keys: SecurityConfig, logs: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file of a Kubernetes Secret, which belongs to root."""
    assert keys.keys is not None, "made above"
    secret_file(keys.keys, BUFFER).chmod(mode)
    monkeypatch.setattr("os.geteuid", lambda: 54321)
    service_keys(keys, BUFFER)
    assert len(logs) == warnings
