"""The processes that stand for rollout servers, and what passes between them and the bench."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import zmq

from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.messages import Message
from slipstream.configs.runtime.errors import DeadlineError
from slipstream.tools.bench.processes import ONE_THREAD, Processes, supervised
from slipstream.tools.launch.supervise import Child

ANSWER_S = 600.0
CHECK_MS = 100


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


class Crew(Processes):
    """The bench's processes; all end with `crew()`."""

    @contextlib.contextmanager
    def worker(
        self, name: str, module: str, *words: str, environment: Mapping[str, str] = ONE_THREAD
    ) -> Iterator[Worker]:
        """Starts `module` of this package; it is given the address that its orders come from, and `words`."""
        module = f"slipstream.tools.bench.weights.{module}"
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind("tcp://127.0.0.1:*")
            address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            with self.running(name, module, address, *words, environment=environment) as child:
                yield Worker(self, child, socket)


@contextlib.contextmanager
def crew() -> Iterator[Crew]:
    """A crew in a temporary folder; nothing of it stays."""
    with supervised() as started:
        yield Crew(*started)


def alternately(rounds: int, cases: Sequence[str]) -> Iterator[str]:
    """The cases in turn, so that the machine's moods hit all of them alike."""
    for _ in range(rounds):
        yield from cases
