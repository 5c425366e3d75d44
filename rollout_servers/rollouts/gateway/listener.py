"""The gateway's HTTP server, in the event loop of the rollout server: address, connections, heads of requests."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.logging import get_log
from slipstream.rollout_servers.rollouts.gateway.app import GatewayApp
from slipstream.rollout_servers.rollouts.gateway.sessions import Gateway

log = get_log("rollout.gateway")

HEAD_S: Final = 30.0
"""Time for a request's head to arrive."""
MOST_HEAD_BYTES: Final = 16 << 10
"""Of a request's head that has not arrived whole."""
MOST_CONNECTIONS: Final = 4096


class _Protocol(HttpToolsProtocol):
    """HTTP that closes a connection on which the head of a request is too long or does not arrive in time.

    A request's `state.cycle` is uvicorn's own state of it.
    """

    _head: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _is_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Waits for the rest of a request that has begun."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._is_head and self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        super().on_headers_complete()
        self._is_head = False
        self.scope["state"]["cycle"] = self.cycle

    def on_message_complete(self) -> None:
        """Called by the parser."""
        super().on_message_complete()
        self._is_head, self._head_bytes = True, 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no longer."""
        super().connection_lost(exc)
        if self._head is not None:
            self._head.cancel()

    def _wait_for_head(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._head is None and not is_answering:
            self._head = self.loop.call_later(HEAD_S, self.transport.close)
        elif self._head is not None and is_answering:
            self._head.cancel()
            self._head = None


class _Server(uvicorn.Server):
    """Leaves the process's signals alone: the rollout server handles them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(gateway: Gateway | None, config: RunConfig, server: str) -> AsyncIterator[None]:
    """Serves a gateway in the running loop, if there is one; `gateways/<server>.json` in the run folder has its address
    and the key that opens sessions.

    Raises: ConfigError when the address can't be bound.
    """
    if gateway is None:
        yield
        return
    bind, url = config.rollout.gateway.bind, config.rollout.gateway.url
    host, _, port = bind.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"rollout.gateway.bind={bind} can't be bound: {error.strerror}") from error
    http = _Server(
        uvicorn.Config(
            GatewayApp(gateway).app(),
            lifespan="off",
            ws="none",
            http=_Protocol,
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=1,
        )
    )
    address = f"http://{host}:{listener.getsockname()[1]}"
    gateway.url = (url or address).rstrip("/")
    task = asyncio.create_task(http.serve(sockets=[listener]))
    file = config.paths.gateways / f"{server}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, [msgspec.json.encode({"url": gateway.url, "key": gateway.key})], durable=False, mode=0o600)
    log.info("gateway listens", address=address, url=gateway.url, file=str(file))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        http.should_exit = True
        await asyncio.wait([task])
        listener.close()
