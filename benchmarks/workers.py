"""Worker processes of a measurement in a temporary folder; both are removed at its end."""

import contextlib
import inspect
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil
import zmq
import zmq.asyncio

from slipstream.configs import RunConfig
from slipstream.configs.load import dump_config
from slipstream.configs.runtime.errors import DeadlineError, SlipstreamError
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.launch.redis import redis_command, wait_until_ready
from slipstream.tools.launch.supervise import Child, Supervisor

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
REPLY_DEADLINE_S = 600.0
REDIS_DEADLINE_S = 60.0
POLL_MS = 100
WAIT_S = 0.1


class Stopped(SlipstreamError):
    """A signal ended the measurement."""


class Worker:
    """A process that serves one request at a time; both are any values that msgpack has a type for."""

    def __init__(self, workers: "Workers", child: Child, socket: "zmq.Socket[bytes]") -> None:
        self._workers = workers
        self._child = child
        self._socket = socket

    def send(self, *request: object) -> None:
        """Requests the call of a method with these arguments."""
        self._socket.send(msgspec.msgpack.encode(request))

    def replied(self) -> bool:
        """True if a reply has arrived."""
        return bool(self._socket.poll(0))

    def receive(self, kind: Any = Any, deadline_s: float = REPLY_DEADLINE_S) -> Any:
        """The next reply. Raises: SlipstreamError when a process ended, DeadlineError without a reply in time."""
        deadline = time.monotonic() + deadline_s
        while not self._socket.poll(POLL_MS):
            self._workers.check()
            if time.monotonic() > deadline:
                raise DeadlineError(f"{self._child.name} did not reply within {deadline_s:g} s")
        return msgspec.msgpack.decode(self._socket.recv(), type=kind)

    def call(self, *request: object, deadline_s: float = REPLY_DEADLINE_S) -> Any:
        """Calls a method; returns its result."""
        self.send(*request)
        return self.receive(deadline_s=deadline_s)


async def serve(address: str, role: object) -> None:
    """Calls the methods of `role` that are requested from `address`, one at a time, until cancelled.

    The first reply is None, without a request: the process has started.
    """
    reply: Any = None
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        while True:
            await socket.send(msgspec.msgpack.encode(reply))
            method, *arguments = msgspec.msgpack.decode(await socket.recv())
            reply = getattr(role, method)(*arguments)
            if inspect.isawaitable(reply):
                reply = await reply


class Workers:
    """Starts processes, checks on them, and waits.

    Attributes:
        folder: temporary.
    """

    def __init__(self, folder: Path, supervisor: Supervisor, signals: StopSignals) -> None:
        self.folder = folder
        self._supervisor = supervisor
        self._signals = signals

    @classmethod
    @contextlib.contextmanager
    def start(cls) -> Iterator[Self]:
        """Context with a temporary folder; in the end all processes are stopped."""
        with (
            tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder,
            StopSignals() as signals,
            Supervisor(Path(folder), signals) as supervisor,
        ):
            yield cls(Path(folder), supervisor, signals)

    @contextlib.contextmanager
    def command(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] = ONE_THREAD
    ) -> Iterator[Child]:
        """A process, which ends with the context."""
        try:
            yield self._supervisor.start(name, command, environment)
        finally:
            self._supervisor.stop(name)

    @contextlib.contextmanager
    def process(
        self, name: str, module: str, *arguments: str, environment: Mapping[str, str] = ONE_THREAD
    ) -> Iterator[Child]:
        """A process that runs a Python module."""
        with self.command(name, [sys.executable, "-m", module, *arguments], environment) as child:
            yield child

    @contextlib.contextmanager
    def worker(
        self, name: str, module: str, *arguments: str, environment: Mapping[str, str] = ONE_THREAD
    ) -> Iterator[Worker]:
        """A process that runs a module with the address of its requests and `arguments`, to call `serve`."""
        with zmq.Context() as context, context.socket(zmq.PAIR) as pair:
            pair.setsockopt(zmq.LINGER, 0)
            pair.bind("tcp://127.0.0.1:*")
            address = pair.getsockopt_string(zmq.LAST_ENDPOINT)
            with self.process(name, module, address, *arguments, environment=environment) as child:
                yield Worker(self, child, pair)

    @contextlib.contextmanager
    def run(self, config: RunConfig, *, cores: Sequence[int] | None = None) -> Iterator[dict[str, Child]]:
        """The four processes of a run, by name: redis, buffer, rollout, learner.

        Args:
            cores: of the rollout server, and of the other processes; None: any.
        """
        name, file = config.run.name, self.write_config(config)
        modules = {
            "buffer": "slipstream.buffer.cli",
            "rollout": "slipstream.rollout_servers.cli",
            "learner": "slipstream.learner.cli",
        }
        children: dict[str, Child] = {}

        def add(role: str, process: contextlib.AbstractContextManager[Child]) -> None:
            children[role] = stack.enter_context(process)
            if cores is not None:  # before it starts threads, which inherit it
                os.sched_setaffinity(children[role].process.pid, {cores[0] if role == "rollout" else cores[1]})

        with contextlib.ExitStack() as stack:
            add("redis", self.command(f"{name}-redis", redis_command(config.redis, config.paths.redis)))
            wait_until_ready(config.redis, REDIS_DEADLINE_S, pause=self.pause)
            for role, module in modules.items():
                add(role, self.process(f"{name}-{role}", module, file))
            yield children

    def write_config(self, config: RunConfig) -> str:
        """Writes a configuration for other processes; returns its path."""
        file = self.folder / f"{config.run.name}.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        return str(file)

    def pause(self, timeout_s: float) -> None:
        """Waits, or less if something happens. Raises: SlipstreamError as `check` does."""
        self._signals.wait(timeout_s)
        self.check()

    def wait(self, child: Child, tick: Callable[[], None] = lambda: None) -> None:
        """Waits until a process exits with 0, and calls `tick` meanwhile. Raises: SlipstreamError as `check` does."""
        while child.exit_code != 0:
            tick()
            self._signals.wait(WAIT_S)
            self.check(finishing=child)

    def check(self, finishing: Child | None = None) -> None:
        """Raises: Stopped after a signal, SlipstreamError when a process has ended; `finishing` may exit with 0."""
        if self._signals.received:
            raise Stopped(f"{self._signals.received[0].name} received; all processes are stopped")
        for child in self._supervisor.ended():
            if child is finishing and child.exit_code == 0:
                continue
            raise SlipstreamError("\n".join([f"{child.name} ended with {child.ending}:", *child.last_lines(20)]))


def free_port() -> int:
    """A loopback port that is free at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_s(process: psutil.Process) -> float:
    """CPU time that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)
