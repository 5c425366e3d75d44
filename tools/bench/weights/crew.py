"""The processes that stand for rollout servers, and what passes between them and the bench."""

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.messages import Message
from slipstream.configs.errors import DeadlineError, SlipstreamError
from slipstream.tools.stop_signals import StopSignals
from slipstream.tools.supervise import Child, Supervisor

ANSWER_S = 600.0
CHECK_MS = 100
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Worker:
    """A process that does as it is told, one order at a time."""

    def __init__(self, crew: "Crew", child: Child, socket: "zmq.Socket[bytes]") -> None:
        self._crew = crew
        self._child = child
        self._socket = socket

    def tell(self, order: Message) -> None:
        """Gives an order."""
        self._socket.send(encode(order))

    def answer(self, kind: Any, deadline_s: float = ANSWER_S) -> Any:
        """Its next answer. Raises: SlipstreamError when a process died, DeadlineError when it says nothing."""
        give_up = time.monotonic() + deadline_s
        while not self._socket.poll(CHECK_MS):
            self._crew.go_on()
            if time.monotonic() > give_up:
                raise DeadlineError(f"{self._child.name} did not answer within {deadline_s:g} s")
        return decode(self._socket.recv(), kind)

    def ask(self, order: Message, kind: Any, deadline_s: float = ANSWER_S) -> Any:
        """Gives an order and waits for its answer."""
        self.tell(order)
        return self.answer(kind, deadline_s)


class Crew:
    """The bench's processes; all end with `crew()`."""

    def __init__(self, folder: Path, supervisor: Supervisor, signals: StopSignals, context: "zmq.Context[Any]") -> None:
        self.folder = folder
        self._supervisor = supervisor
        self._signals = signals
        self._context = context

    @contextlib.contextmanager
    def worker(
        self, name: str, module: str, *words: str, environment: Mapping[str, str] = ONE_THREAD
    ) -> Iterator[Worker]:
        """Starts `module` of this package; it is given the address that its orders come from, and `words`."""
        with self._context.socket(zmq.PAIR) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind("tcp://127.0.0.1:*")
            address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            command = [sys.executable, "-m", f"slipstream.tools.bench.weights.{module}", address, *words]
            yield Worker(self, self._supervisor.start(name, command, environment), socket)
            self._supervisor.stop(name)

    def go_on(self) -> None:
        """Raises: SlipstreamError when the user has asked for the end, or a process has died."""
        if self._signals.received:
            raise SlipstreamError(f"{self._signals.received[0].name} received; everything is stopped")
        for child in self._supervisor.ended():
            raise SlipstreamError("\n".join([f"{child.name} ended with {child.ending}:", *child.last_lines(20)]))

    def pause(self, timeout_s: float) -> None:
        """Waits, or less if something happens. Raises: SlipstreamError as `go_on` does."""
        self._signals.wait(timeout_s)
        self.go_on()


@contextlib.contextmanager
def crew() -> Iterator[Crew]:
    """A crew in a temporary folder; nothing of it stays."""
    with (
        tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder,
        StopSignals() as signals,
        Supervisor(Path(folder), signals) as supervisor,
        zmq.Context() as context,
    ):
        yield Crew(Path(folder), supervisor, signals, context)


def alternately(rounds: int, cases: Sequence[str]) -> Iterator[str]:
    """The cases in turn, so that the machine's moods hit all of them alike."""
    for _ in range(rounds):
        yield from cases
