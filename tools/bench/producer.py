"""A rollout server without an engine: speaks its part of the wire, and has every group's tokens ready.

Knows nothing of `rollout_servers`: it is what the buffer is measured with.
"""

import random
import resource
import sys
import time
import uuid
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import zmq

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.sockets import connect_dealer

HEARTBEAT_S = 1.0
GROUPS_PER_MESSAGE = 16


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a producer is to do."""

    endpoint: str
    run: str
    groups: int
    extra: int = 0
    """Further groups that it delivers: of several shards, one may get its tickets before the others."""
    answers: int
    """Trajectories of a group."""
    tokens: int
    """Of a trajectory, an eighth of them the prompt."""
    credits: int
    """Tickets that it holds at most."""
    rate: float | None = None
    """Groups per second, at random times (a Poisson process); None: as fast as tickets come."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What it has seen; times are of the machine's monotonic clock."""

    first_push: float
    latencies_s: list[float]
    """Of each group, from the time that it was complete to its acknowledgement as `ready`."""
    cpu_s: float
    """Of the process, from the first push on."""


def trajectories(answers: int, tokens: int, version: int) -> list[m.Trajectory]:
    """Answers as an engine leaves them."""
    rng = np.random.default_rng(0)
    prompt = max(1, tokens // 8)
    mask = np.ones(tokens, dtype=m.MASK_DTYPE)
    mask[:prompt] = 0
    return [
        m.Trajectory(
            token_ids=rng.integers(0, 150_000, tokens).astype(m.TOKEN_DTYPE).tobytes(),
            action_mask=mask.tobytes(),
            behaviour_logprobs=(-rng.exponential(size=tokens) * mask).astype(m.LOGPROB_DTYPE).tobytes(),
            spans=[m.VersionSpan(version=version, start=prompt, end=tokens)],
            reward=float(number % 2),
            scores={"exact_match": float(number % 2)},
            finish_reason="stop",
        )
        for number in range(answers)
    ]


class Producer:
    """The conversation with the service, on one blocking socket."""

    def __init__(self, work: Work, socket: "zmq.Socket[bytes]") -> None:
        self._work = work
        self._socket = socket
        self._tickets: deque[m.Ticket] = deque()
        self._held: set[str] = set()
        self._complete_at: dict[str, float] = {}
        """When the last token of each group that is not acknowledged was there."""
        self._latencies_s: list[float] = []
        self._sent = 0
        self._heartbeat_at = 0.0
        self._answers = trajectories(work.answers, work.tokens, version=0)
        self._random = random.Random(0)

    def run(self) -> Report:
        """Introduces itself and delivers all its groups."""
        self._send(
            m.ServerHello(
                run=self._work.run, env="bench", env_fingerprint="bench", train_tasks=1000, eval_tasks=0,
                tokenizer_fingerprint="bench", incarnation=uuid.uuid4().hex,
            )
        )  # fmt: skip
        while not self._tickets:
            self._hear(timeout_s=HEARTBEAT_S)
        first_push, cpu_before = time.monotonic(), _cpu_s()
        due = first_push
        while len(self._latencies_s) < self._work.groups:
            now = time.monotonic()
            if self._work.rate is None:
                self._push(GROUPS_PER_MESSAGE, complete_at=now)
            elif due <= now and self._tickets:
                self._push(1, complete_at=due)
                due += self._random.expovariate(self._work.rate)
            until = due if self._work.rate is not None else now
            has_more = self._tickets and self._sent < self._work.groups
            self._hear(timeout_s=max(0.0, until - time.monotonic()) if has_more else HEARTBEAT_S)
        return Report(
            first_push=first_push,
            latencies_s=self._latencies_s,
            cpu_s=_cpu_s() - cpu_before,
        )

    def stay(self) -> None:
        """Delivers what is extra and keeps the other tickets, as a server does that works on them."""
        while True:
            self._push(GROUPS_PER_MESSAGE, complete_at=time.monotonic())
            self._hear(timeout_s=HEARTBEAT_S)

    def _push(self, count: int, *, complete_at: float) -> None:
        count = min(count, len(self._tickets), self._work.groups + self._work.extra - self._sent)
        if not count:
            return
        tickets = [self._tickets.popleft() for _ in range(count)]
        blobs = [
            encode(
                m.Group(
                    id=ticket.id, kind=ticket.kind, epoch=ticket.epoch, indices=ticket.indices,
                    trajectories=self._answers,
                )
            )
            for ticket in tickets
        ]  # fmt: skip
        self._complete_at |= dict.fromkeys((ticket.id for ticket in tickets), complete_at)
        self._sent += count
        self._send(m.Deliver(ids=[ticket.id for ticket in tickets]), *blobs)

    def _hear(self, *, timeout_s: float) -> None:
        """Takes in what has come, waiting at most so long for the first of it."""
        if time.monotonic() >= self._heartbeat_at:
            self._heartbeat_at = time.monotonic() + HEARTBEAT_S
            status = m.ServerStatus(server="bench", version=0)
            self._send(m.Credits(capacity=self._work.credits, status=status, held=list(self._held)))
        timeout_ms = round(min(timeout_s, HEARTBEAT_S) * 1000)
        while self._socket.poll(timeout_ms):
            timeout_ms = 0
            match decode(self._socket.recv(), m.ToServer):
                case m.Tickets(tickets=tickets):
                    self._tickets.extend(tickets)
                    self._held.update(ticket.id for ticket in tickets)
                case m.Acknowledge(outcomes=outcomes):
                    self._acknowledged(outcomes)
                case m.Refused(reason=reason):
                    sys.exit(f"refused: {reason}")

    def _acknowledged(self, outcomes: dict[str, str]) -> None:
        now = time.monotonic()
        for group_id, outcome in outcomes.items():
            if outcome != "ready":
                sys.exit(f"group {group_id}: {outcome}")
            self._held.discard(group_id)
            self._latencies_s.append(now - self._complete_at.pop(group_id))

    def _send(self, message: m.Message, *blobs: bytes) -> None:
        self._socket.send_multipart([encode(message), *blobs], copy=False)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Entry point: the work as JSON, and where the report goes."""
    work = msgspec.json.decode(sys.argv[1], type=Work)
    report = Path(sys.argv[2])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    producer = Producer(work, connect_dealer(context, work.endpoint, identity="bench"))
    try:
        found = producer.run()
        written = report.with_suffix(".part")
        written.write_bytes(msgspec.json.encode(found))
        written.rename(report)
        producer.stay()
    finally:
        context.destroy(linger=0)


if __name__ == "__main__":
    main()
