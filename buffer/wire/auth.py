"""CURVE keys: the files of `security.keys`, authentication of clients, and the log of failed handshakes.

Buffer, learner and rollout servers have one key pair each. The buffer accepts the other two and sees with each message
which of them sent it; the learner's control plane and stream accept rollout servers only.

The reply of ZAP (RFC 27) is written here, in six lines: pyzmq's `Authenticator` gives it in a thread of its own, which
does not see the socket's monitor, whose events tell which failed handshakes were refusals.
"""

import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import LogInterval, get_log
from slipstream.configs.schema.weights import SecurityConfig

log = get_log("wire.curve")

BUFFER = "buffer"
LEARNER = "learner"
ROLLOUT = "rollout"
CLIENTS = {BUFFER: (LEARNER, ROLLOUT), LEARNER: (ROLLOUT,)}
"""Names of the key pairs that a service accepts."""

Z85_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class ServiceKeys:
    """Keys of a socket that binds; z85 text."""

    secret: bytes = field(repr=False)
    clients: Mapping[bytes, str]
    """Names of the clients by the public key that they must prove to own."""


@dataclass(frozen=True)
class ClientKeys:
    """Keys of a socket that connects; z85 text."""

    public: bytes
    secret: bytes = field(repr=False)
    service: bytes
    """The public key that the service must prove to own."""


def public_file(folder: Path, name: str) -> Path:
    """The file with the public key of a pair."""
    return folder / f"{name}.key"


def secret_file(folder: Path, name: str) -> Path:
    """The file with both keys of a pair."""
    return folder / f"{name}.key_secret"


def service_keys(security: SecurityConfig, name: str) -> ServiceKeys | None:
    """Keys for a socket on which `name` (BUFFER or LEARNER) listens, None without `security.keys`.

    Raises: ConfigError naming the file that is missing or wrong.
    """
    if security.keys is None:
        return None
    _, secret = _pair(secret_file(security.keys, name))
    clients = {_public(public_file(security.keys, client)): client for client in CLIENTS[name]}
    return ServiceKeys(secret=secret, clients=clients)


def client_keys(security: SecurityConfig, name: str, *, service: str) -> ClientKeys | None:
    """Keys for a socket by which `name` (LEARNER or ROLLOUT) connects to `service`, None without `security.keys`.

    Raises: ConfigError naming the file that is missing or wrong.
    """
    if security.keys is None:
        return None
    public, secret = _pair(secret_file(security.keys, name))
    return ClientKeys(public=public, secret=secret, service=_public(public_file(security.keys, service)))


def proven_name(frame: "zmq.Frame") -> str | None:
    """The name of the key pair whose client sent a frame; None if the socket has no keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:  # the property is absent
        return None


def _public(file: Path) -> bytes:
    public, _ = _read(file)
    if not Z85_KEY.fullmatch(public):
        raise _wrong(file, "its public key is not valid")
    return public


def _pair(file: Path) -> tuple[bytes, bytes]:
    public, secret = _read(file)
    if secret is None:
        raise _wrong(file, "it holds no secret key")
    if not Z85_KEY.fullmatch(secret) or zmq.curve_public(secret) != public:
        raise _wrong(file, "its secret key does not belong to its public key")
    status = file.stat()
    # Another user's file is read by the group, as one of a Kubernetes Secret.
    others = 0o077 if status.st_uid == os.geteuid() else 0o037
    if status.st_mode & others:
        log.warning("others may read a secret key", file=str(file), remedy=f"chmod 600 {file}")
    return public, secret


def _read(file: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(file)
    except ValueError:
        raise _wrong(file, "it holds no public key") from None
    except PermissionError:
        raise ConfigError(f"security.keys: {file} can't be read: give it to the user of this process") from None
    except OSError as error:
        if file.exists():
            raise ConfigError(f"security.keys: {file} can't be read: {error.strerror or error}") from None
        raise ConfigError(
            f"security.keys: there is no {file}; copy it from the folder that `slipstream keys new` made"
        ) from None


def _wrong(file: Path, what: str) -> ConfigError:
    return ConfigError(
        f"security.keys: {file} is not a valid key file: {what}; copy it again from the folder that "
        "`slipstream keys new` made"
    )


LOG_EVERY_S = 10.0
ZAP_ADDRESS = "inproc://zeromq.zap.01"  # RFC 27: libzmq sends a request here for every client that has proven a key
ZAP_VERSION = b"1.0"
KEYS = "the same security.keys on both sides (docs/security.md), then restart this client: ZeroMQ does not always retry"
RETRIED = "check which process listens at that address and whether it has security.keys; ZeroMQ retries"
EVENTS = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.MONITOR_STOPPED
)


class Refusal(StrEnum):
    """Codes of failed handshakes."""

    UNKNOWN_CLIENT = "unknown_client"
    KEY_REFUSED = "key_refused"
    KEYS_ON_ONE_SIDE = "keys_on_one_side"
    OTHER_SERVICE_KEY = "other_service_key"
    PROTOCOL_ERROR = "protocol_error"
    BROKEN_OFF = "broken_off"
    UNFINISHED = "unfinished"


REASONS = {
    Refusal.UNKNOWN_CLIENT: "the client's key is not the one that is let in",
    Refusal.KEY_REFUSED: "the service doesn't let this key in",
    Refusal.KEYS_ON_ONE_SIDE: "one side has keys and the other has none",
    Refusal.OTHER_SERVICE_KEY: "the client has another public key of the service",
    Refusal.PROTOCOL_ERROR: "ZeroMQ reports a protocol error",
    Refusal.BROKEN_OFF: "the other side broke the handshake off, as it does when keys differ",
    Refusal.UNFINISHED: "the other side did not finish the handshake: it has keys, is frozen or no slipstream, or a "
    "proxy before it does not reach it",
}


class HandshakeRefusals:
    """Counts a socket's failed handshakes; logs at most one per LOG_EVERY_S, so that clients can't fill the log."""

    def __init__(self, address: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._log_interval = LogInterval(LOG_EVERY_S, clock=clock)
        self._count = 0

    def add(self, code: Refusal, **details: str) -> None:
        """Counts one failed handshake."""
        self._count += 1
        if self._log_interval.due():
            log.warning(
                "handshake refused",
                address=self._address,
                code=code.value,
                reason=REASONS[code],
                refused=self._count,
                remedy=RETRIED if code is Refusal.UNFINISHED else KEYS,
                **details,
            )


def watch(
    context: "zmq.Context[Any]",
    socket: "zmq.Socket[Any]",
    address: str,
    *,
    keyed: bool,
    allowed: Mapping[bytes, str] | None = None,
) -> None:
    """Starts a thread that authenticates clients of a socket and logs failed handshakes, until the socket closes.

    The socket must not be bound or connected yet.

    Args:
        keyed: whether the socket has keys.
        allowed: names by accepted public key (z85 text), for a socket that authenticates its clients; ZeroMQ allows
            one such socket per context.
    """
    # Sockets that the context does not track: destroying it must not close them while the thread uses them. They are
    # created here, where the context is certainly alive.
    shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
    events_at = f"inproc://handshakes-{uuid.uuid4().hex}"
    socket.monitor(events_at, EVENTS)
    events = shadow.socket(zmq.PAIR)
    events.connect(events_at)
    requests = None
    if allowed is not None:
        requests = shadow.socket(zmq.REP)
        requests.bind(ZAP_ADDRESS)
    names = {z85.decode(key): name for key, name in (allowed or {}).items()}
    authenticator = ZapAuthenticator(events, requests, names, HandshakeRefusals(address), keyed)
    threading.Thread(target=authenticator.serve, name=f"handshakes {address}", daemon=True).start()


@dataclass
class ZapAuthenticator:
    """Answers libzmq's authentication requests (ZAP, RFC 27), and counts failed handshakes."""

    events: "zmq.Socket[bytes]"
    requests: "zmq.Socket[bytes] | None"
    allowed: Mapping[bytes, str]
    """Names of the accepted clients, by public key."""
    refusals: HandshakeRefusals
    keyed: bool

    def serve(self) -> None:
        """Runs until the watched socket is closed or the context ends; later clients are refused."""
        poller = zmq.Poller()
        poller.register(self.events, zmq.POLLIN)
        if self.requests is not None:
            poller.register(self.requests, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self.requests in ready:
                    assert self.requests is not None, "registered above"
                    self.requests.send_multipart(self._reply(self.requests.recv_multipart()))
                if self.events in ready:
                    event = parse_monitor_message(self.events.recv_multipart())
                    if event["event"] == zmq.Event.MONITOR_STOPPED:
                        return
                    self._count_failure(zmq.Event(event["event"]), event["value"])
        except zmq.ContextTerminated:
            pass  # the process has closed its sockets
        finally:
            self.events.close(linger=0)
            if self.requests is not None:
                self.requests.close(linger=0)

    def _reply(self, request: list[bytes]) -> list[bytes]:
        """The reply to a request of RFC 27: version, request id, domain, address, identity, mechanism, credentials…"""
        _, request_id, _, peer, _, mechanism, *credentials = request
        if mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self.allowed:
            return [ZAP_VERSION, request_id, b"200", b"OK", self.allowed[credentials[0]].encode(), b""]
        self.refusals.add(Refusal.UNKNOWN_CLIENT, peer=peer.decode(errors="replace"))
        return [ZAP_VERSION, request_id, b"400", b"unknown key", b"", b""]

    def _count_failure(self, event: zmq.Event, value: int) -> None:
        match event, value:
            case zmq.Event.HANDSHAKE_FAILED_AUTH, _ if self.requests is not None:
                pass  # our own refusal, counted already
            case zmq.Event.HANDSHAKE_FAILED_AUTH, _:
                self.refusals.add(Refusal.KEY_REFUSED)
            case zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                self.refusals.add(Refusal.KEYS_ON_ONE_SIDE)
            case zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
                self.refusals.add(Refusal.OTHER_SERVICE_KEY)
            case zmq.Event.HANDSHAKE_FAILED_PROTOCOL, _:
                self.refusals.add(Refusal.PROTOCOL_ERROR, error=f"{value:#x}")
            case _ if self.keyed:
                self.refusals.add(Refusal.BROKEN_OFF)
            case _:
                self.refusals.add(Refusal.UNFINISHED)
