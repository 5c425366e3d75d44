"""A real buffer service and Redis, and a rollout server that delivers random groups."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from slipstream.buffer.client import BufferClient
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, encode
from slipstream.configs import RunConfig
from slipstream.configs.load import dump_config
from tests.buffer.peers import announced
from tests.learner.recorded import trajectory

DEADLINE_S = 20.0
LEARNER = "a1"
"""The learner's incarnation."""


def served_sections(redis_url: str, run: str, address: str, folder: Path) -> dict[str, Any]:
    """Sections of a configuration with a buffer."""
    return {
        "run": {"name": run, "dir": str(folder)},
        "redis": {"url": redis_url},
        "buffer": {"bind": address, "endpoint": address, "reply_deadline_s": DEADLINE_S},
        "rollout": {"group_size": 2, "group_deadline_s": DEADLINE_S / 2},
    }


@dataclass
class RolloutServer:
    """Delivers a random group for each of its tickets."""

    config: RunConfig
    socket: "zmq.Socket[bytes]"

    def hello(self) -> None:
        """Returns once the service has registered it."""
        hello = m.ServerHello(
            run=self.config.run.name, env="digits", env_fingerprint="", train_tasks=100, eval_tasks=0,
            tokenizer_fingerprint="", vocab_size=32, incarnation="i1",
        )  # fmt: skip
        self.socket.send(encode(hello))
        self._await(m.Welcome)

    def deliver(self, count: int, lengths: Sequence[int] = (8,)) -> list[m.Trajectory]:
        """Delivers that many groups, in turn of these lengths; returns their trajectories, in the order of tickets."""
        self._offer(count)
        tickets: list[m.Ticket] = []
        while len(tickets) < count:
            tickets += self._await(m.Tickets).tickets
        self._offer(0)
        groups = [
            m.Group(
                id=ticket.id, kind=ticket.kind, epoch=ticket.epoch, indices=ticket.indices,
                trajectories=[
                    trajectory(np.random.default_rng([int(ticket.id), number]), tokens=tokens, episode=number)
                    for number in range(ticket.samples)
                ],
            )
            for ticket, tokens in zip(tickets, cycle(lengths), strict=False)
        ]  # fmt: skip
        frames = [encode(announced(*groups)), *(encode(group) for group in groups)]
        self.socket.send_multipart(frames)
        assert set(self._await(m.Acknowledge).outcomes.values()) == {"ready"}
        return [each for group in groups for each in group.trajectories]

    def _offer(self, capacity: int) -> None:
        self.socket.send(encode(m.Credits(capacity=capacity, status=m.ServerStatus(server="rollout"), held=[])))

    def _await(self, kind: Any) -> Any:
        while self.socket.poll(round(DEADLINE_S * 1000)):
            message = decode(self.socket.recv(), m.ToServer)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} came within {DEADLINE_S} s")


@contextmanager
def serving(config: RunConfig, folder: Path) -> Iterator[RolloutServer]:
    """Context in which a rollout server and a learner are registered with a buffer service."""
    path = folder / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    service = subprocess.Popen([sys.executable, "-m", "slipstream.buffer.cli", str(path)])
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, b"rollout")
        socket.connect(config.buffer.endpoint)
        server = RolloutServer(config, socket)
        try:
            server.hello()
            with closing(BufferClient(config, "learner", LEARNER)) as client:
                client.hello(0)
                yield server  # no tickets are issued to a run whose learner is not connected
        finally:
            service.terminate()
            service.wait(DEADLINE_S)
