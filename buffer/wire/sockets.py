"""ZeroMQ sockets with the project's settings: bounded queues, encryption with keys, errors that name the address.

All sockets of the project are created here, asyncio or blocking according to their context.
"""

import contextlib
from typing import Any, TypeVar

import zmq

from slipstream.buffer.wire.auth import ClientKeys, ServiceKeys, watch
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.network import is_local_address

log = get_log("wire.sockets")

QUEUE_MESSAGES = 10_000
MAX_MESSAGE_BYTES = 1 << 30
"""A larger message is refused before the service reads it."""
MAX_REPLY_BYTES = 64 << 20
"""Far above any answer of a service; the largest is the manifest of a model with tens of thousands of tensors."""
LEAVE_MS = 200
ZAP_DOMAIN = b"slipstream"

Socket = TypeVar("Socket", bound="zmq.Socket[Any]")


def bind_router(
    context: "zmq.Context[Socket]",
    address: str,
    *,
    max_message_bytes: int,
    keys: ServiceKeys | None = None,
    endpoint: str | None = None,
) -> Socket:
    """A ROUTER that listens on `address`; with keys it accepts only their clients. At most one with keys per context.

    A peer that sends a frame of more than `max_message_bytes` is disconnected before memory is allocated for it.

    Args:
        endpoint: the address that peers are configured with; a mismatch is logged.

    Raises: ConfigError when the address is taken or no address of this host.
    """
    if keys is None and not is_local_address(address):
        log.warning(
            "LISTENS BEYOND THIS HOST WITHOUT KEYS: anyone who reaches the port can read the run and take part in it",
            address=address,
            remedy="`slipstream keys new`, then security.keys; see docs/security.md",
        )
    if endpoint is not None and is_local_address(address) and not is_local_address(endpoint):
        log.warning(
            "listens on this host only, but the endpoint is an address for other hosts",
            address=address,
            endpoint=endpoint,
            remedy="listen on an address that they reach (buffer.bind, weights.bind), such as 0.0.0.0",
        )
    socket = context.socket(zmq.ROUTER)
    _configure(socket, address, max_message_bytes)
    # HANDOVER: a peer that reconnects under its identity replaces its old route. MANDATORY: an absent peer is an error.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Without it libzmq accepts every client while no authenticator runs.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    watch(context, socket, address, keyed=keys is not None, allowed=None if keys is None else keys.clients)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"can't listen on {address}: {error.strerror}; choose another address or port") from None
    return socket


def connect_dealer(
    context: "zmq.Context[Socket]",
    address: str,
    *,
    identity: str,
    keys: ClientKeys | None = None,
    max_message_bytes: int = MAX_REPLY_BYTES,
    queue_offline: bool = True,
) -> Socket:
    """A DEALER that connects to `address` and keeps reconnecting; with keys it accepts only their service.

    After the other side has refused the key, ZeroMQ does not retry and sending blocks. That is logged; a blocking
    caller must send with NOBLOCK and keep its own deadline.

    Args:
        queue_offline: keep messages while there is no connection and send them later; False: sending waits.
    """
    socket = context.socket(zmq.DEALER)
    _configure(socket, address, max_message_bytes)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.IMMEDIATE, not queue_offline)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.service)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    watch(context, socket, address, keyed=keys is not None)
    socket.connect(address)
    return socket


def send_and_close(socket: "zmq.Socket[Any]", frame: bytes) -> None:
    """Sends a last frame and closes the socket; delivery has LEAVE_MS, if the other side is connected."""
    with contextlib.suppress(zmq.Again):
        zmq.Socket.shadow(socket).send(frame, zmq.NOBLOCK)
    socket.close(linger=LEAVE_MS)


def _configure(socket: "zmq.Socket[Any]", address: str, max_message_bytes: int) -> None:
    # Not always: a host name with addresses of both kinds would then resolve to the IPv6 one.
    socket.setsockopt(zmq.IPV6, "[" in address)
    # linger=0: a peer that is gone must not keep this process from exiting.
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
