"""ZeroMQ sockets with the project's settings: bounded queues, no linger, errors that name the address."""

import zmq
import zmq.asyncio

from slipstream.configs.errors import ConfigError

QUEUE_MESSAGES = 10_000


def bind_router(context: zmq.asyncio.Context, address: str, *, max_message_bytes: int) -> zmq.asyncio.Socket:
    """A ROUTER that listens on `address`.

    Raises: ConfigError when the address is taken or no address of this host.
    """
    socket = context.socket(zmq.ROUTER)
    _configure(socket)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    # A peer that came back under its old identity takes its route over; mandatory: an absent peer is an error we see.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"can't listen on {address}: {error.strerror}; choose another address or port") from None
    return socket


def connect_dealer(context: zmq.asyncio.Context, address: str, *, identity: str) -> zmq.asyncio.Socket:
    """A DEALER that connects to `address` and keeps reconnecting."""
    socket = context.socket(zmq.DEALER)
    _configure(socket)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.connect(address)
    return socket


def _configure(socket: zmq.asyncio.Socket) -> None:
    # linger=0: a peer that is gone must not keep this process from exiting.
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
