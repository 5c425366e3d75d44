"""Publication of versions to the rollout servers, in a thread: training does not wait for transfers.

Only the next snapshot waits until no transfer reads the memory that it will overwrite. Each step of a transfer has a
deadline.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
import uvloop
import zmq.asyncio

from slipstream.buffer.wire.auth import LEARNER, service_keys
from slipstream.buffer.wire.codec import FrameError, decode
from slipstream.buffer.wire.sockets import bind_router
from slipstream.buffer.wire.weights import protocol as w
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import LogInterval, get_log
from slipstream.configs.runtime.network import tcp_address
from slipstream.configs.schema.weights import TRANSPORTS, SecurityConfig, Transport, WeightsConfig
from slipstream.learner.weights.distribution import Distribution
from slipstream.learner.weights.members import Roster, Rpc, SyncMetrics
from slipstream.learner.weights.publication import Publication
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports import Transports
from slipstream.models.device_memory import gpu_id

log = get_log("learner.weights")

MAX_CONTROL_BYTES = 1 << 20
LOG_EVERY_S = 10.0
"""Interval of warnings about dropped frames: any peer can send many."""


class WeightPublisher:
    """The control plane on the learner's rank 0, and the transports that it drives."""

    def __init__(self, config: WeightsConfig, security: SecurityConfig, transports: Transports, *, run: str) -> None:
        """`close` closes the transports; only servers of the run `run` are members."""
        self._config = config
        self._security = security
        self._transports = transports
        self.metrics = SyncMetrics()
        self._roster = Roster(run, deadline_s=config.deadline_s)
        # Read here: the current device is per thread.
        self._gpu = gpu_id(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else ""
        self._latest: Publication | None = None
        self._reclaimed: Future[None] | None = None
        self._started: Future[None] = Future()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()), name="weights", daemon=True)
        self._thread.start()
        self._started.result()

    @property
    def on_device(self) -> bool:
        """True if snapshots must lie in the accelerator's memory."""
        broadcast = self._transports.broadcast
        return self.exports or (broadcast is not None and broadcast.on_device)

    @property
    def exports(self) -> bool:
        """True if rollout servers may read them there."""
        return any(transport.on_device for transport in self.offered)

    @property
    def without_engine(self) -> int:
        """Rollout servers that are no members only because their engine is dead."""
        return self._roster.without_engine

    @property
    def offered(self) -> list[Transport]:
        """Transports through which rollout servers may receive."""
        return [TRANSPORTS[name] for name in self._transports.order]

    @property
    def in_place(self) -> bool:
        """True if rollout servers may read snapshots in shared memory."""
        return any(transport.in_place for transport in self.offered)

    def withdraw(self, transport: str) -> None:
        """Sends nothing through this transport any more."""
        self._loop.call_soon_threadsafe(self._distribution.withdraw, transport)

    def reclaim(self) -> None:
        """Waits until the memory of all versions but the latest may be overwritten: before each snapshot but the first.

        Raises: the error that ended the thread.
        """
        reclaimed = self._reclaimed = Future[None]()
        self._call(self._distribution.reclaim, reclaimed)
        reclaimed.result()

    def publish(self, snapshot: Snapshot) -> None:
        """Hands a version over. Raises: the error that ended the thread."""
        publication = self._latest = Publication(snapshot)
        self._call(self._distribution.offer, publication)

    def wait(self) -> None:
        """Waits until every server has applied the version that was published last, or was evicted."""
        if self._latest is not None:
            self._latest.done.result()

    def close(self) -> None:
        """Ends the thread and the transports."""
        with suppress(RuntimeError):  # the thread has ended, its loop is closed
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()
        self._transports.close()

    def _call(self, function: Callable[[Any], None], argument: object) -> None:
        """Calls a function in the thread, after the future to wait for is an attribute. Raises: as `publish`."""
        if self._failure is not None:  # a later failure is set on that future
            raise self._failure
        with suppress(RuntimeError):  # the thread has ended, its loop is closed
            self._loop.call_soon_threadsafe(function, argument)

    # --- in the thread ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._serving = asyncio.ensure_future(self._serve())
        await asyncio.wait([self._serving])
        if self._serving.cancelled():
            return  # close()
        error = self._serving.exception()
        if error is not None and not self._notify_waiters(error):
            raise error

    async def _serve(self) -> None:
        context = zmq.asyncio.Context()
        try:
            socket = self._bind(context)
            self._rpc = Rpc(socket, self._roster, deadline_s=self._config.deadline_s)
            self._distribution = Distribution(
                self._config, self._transports, self._roster, self._rpc, self.metrics, gpu=self._gpu
            )
            self._started.set_result(None)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(socket))
                tasks.create_task(self._distribution.run())
        finally:
            context.destroy(linger=0)

    def _bind(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        weights, keys = self._config, service_keys(self._security, LEARNER)
        address, endpoint = (tcp_address(host, weights.control_port) for host in (weights.bind, weights.host))
        try:
            return bind_router(context, address, max_message_bytes=MAX_CONTROL_BYTES, keys=keys, endpoint=endpoint)
        except ConfigError as error:
            raise ConfigError(f"{error} (weights.bind, weights.control_port)") from None

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        dropped, log_interval = 0, LogInterval(LOG_EVERY_S)
        while True:
            peer, frame = (await socket.recv_multipart())[:2]
            try:
                message = decode(frame, w.FromServer)
            except FrameError as error:
                dropped += 1
                if log_interval.due():
                    log.warning("frame dropped", peer=peer.hex(), dropped=dropped, reason=str(error))
                await asyncio.sleep(0)  # receiving does not yield while frames are waiting
                continue
            if isinstance(message, w.Join):
                if self._roster.receive_join(peer, message):
                    self._distribution.changed()
            elif isinstance(message, w.Leave):
                self._roster.receive_leave(peer)
                self._distribution.changed()
            else:
                self._rpc.receive(peer, message)

    def _notify_waiters(self, error: BaseException) -> bool:
        """Sets the error on all futures that are waited for; returns whether there were any."""
        self._failure = error
        waited_for = (self._started, self._reclaimed, None if self._latest is None else self._latest.done)
        unfinished = [future for future in waited_for if future is not None and not future.done()]
        for future in unfinished:
            future.set_exception(error)
        return bool(unfinished)
