"""A rollout server without an engine: delivers groups of random tokens to the buffer, in a process of its own."""

import random
import sys
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
import zmq

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, encode, encode_group
from slipstream.buffer.wire.sockets import connect_dealer

HEARTBEAT_S = 1.0
POLL_S = 0.05
GROUPS_PER_MESSAGE = 16
VOCABULARY, TASKS = 150_000, 1000


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Request: the groups to deliver."""

    groups: int
    answers: int
    """Trajectories per group."""
    tokens: int
    """Per trajectory; an eighth of them is the prompt."""
    rate: float | None = None
    """Groups per second, with random intervals (a Poisson process); None: as fast as tickets arrive."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Reply, once all groups are acknowledged."""

    first_push: float
    """On the machine's monotonic clock."""
    latencies_s: list[float]
    """Of each group, from its completion to its acknowledgement as `ready`."""
    cpu_s: float
    """CPU time of the process since the first push."""


def hello(run: str, incarnation: str) -> m.ServerHello:
    """The first message of a simulated rollout server."""
    return m.ServerHello(
        run=run, env="bench", env_fingerprint="bench", train_tasks=TASKS, eval_tasks=0, tokenizer_fingerprint="bench",
        vocab_size=VOCABULARY, incarnation=incarnation,
    )  # fmt: skip


def trajectories(answers: int, tokens: int) -> list[m.Trajectory]:
    """Random answers of policy version 0, in the wire format."""
    rng = np.random.default_rng(0)
    prompt = max(1, tokens // 8)
    mask = np.ones(tokens, dtype=m.MASK_DTYPE)
    mask[:prompt] = 0
    return [
        m.Trajectory(
            token_ids=rng.integers(0, VOCABULARY, tokens).astype(m.TOKEN_DTYPE).tobytes(),
            action_mask=mask.tobytes(),
            behaviour_logprobs=(-rng.exponential(size=tokens) * mask).astype(m.LOGPROB_DTYPE).tobytes(),
            spans=[m.VersionSpan(version=0, start=prompt, end=tokens)],
            reward=float(number % 2),
            scores={"exact_match": float(number % 2)},
            finish_reason="stop",
            episode=number,
        )
        for number in range(answers)
    ]


def played(ticket: m.Ticket, answers: list[m.Trajectory]) -> m.Group:
    """The group of a ticket."""
    return m.Group(id=ticket.id, kind=ticket.kind, epoch=ticket.epoch, indices=ticket.indices, trajectories=answers)


def delivery(tickets: Sequence[m.Ticket], answers: Sequence[m.Trajectory]) -> m.Deliver:
    """The announcement of groups of these answers."""
    tokens = sum(span.end - span.start for answer in answers for span in answer.spans)
    ids = [ticket.id for ticket in tickets]
    return m.Deliver(ids=ids, sampled={"bench": dict.fromkeys(ids, tokens)})


class Producer:
    """The protocol of a rollout server, on one blocking socket."""

    def __init__(self, socket: "zmq.Socket[bytes]", run: str, *, credits: int) -> None:
        """Joins the run, to hold up to `credits` tickets."""
        self._socket = socket
        self._credits = credits
        self._tickets: deque[m.Ticket] = deque()
        self._held: set[str] = set()
        self._completed_at: dict[str, float] = {}
        """Of the groups that are not acknowledged yet."""
        self._latencies_s: list[float] = []
        self._heartbeat_at = 0.0
        self._random = random.Random(0)
        self._send(hello(run, "producer"))

    def run(self, workload: Workload) -> Report:
        """Delivers all groups."""
        self._latencies_s, answers, sent = [], trajectories(workload.answers, workload.tokens), 0
        while not self._tickets:
            self.receive(timeout_s=HEARTBEAT_S)
        first_push, cpu_before = time.monotonic(), time.process_time()
        due = first_push
        while len(self._latencies_s) < workload.groups:
            now, left = time.monotonic(), workload.groups - sent
            if workload.rate is None:
                sent += self._push(min(GROUPS_PER_MESSAGE, left), answers, completed_at=now)
            elif due <= now and self._tickets and left:
                sent += self._push(1, answers, completed_at=due)
                due += self._random.expovariate(workload.rate)
            next_push = now if workload.rate is None else due
            has_more = self._tickets and sent < workload.groups
            self.receive(timeout_s=max(0.0, next_push - time.monotonic()) if has_more else HEARTBEAT_S)
        return Report(first_push=first_push, latencies_s=self._latencies_s, cpu_s=time.process_time() - cpu_before)

    def receive(self, *, timeout_s: float) -> None:
        """Handles all messages that have arrived, waiting at most `timeout_s` for the first; sends heartbeats."""
        if time.monotonic() >= self._heartbeat_at:
            self._heartbeat_at = time.monotonic() + HEARTBEAT_S
            status = m.ServerStatus(server="bench", version=0)
            self._send(m.Credits(capacity=self._credits, status=status, held=list(self._held)))
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

    def _push(self, most: int, answers: list[m.Trajectory], *, completed_at: float) -> int:
        tickets = [self._tickets.popleft() for _ in range(min(most, len(self._tickets)))]
        if tickets:
            self._completed_at |= dict.fromkeys((ticket.id for ticket in tickets), completed_at)
            groups = [encode_group(played(ticket, answers)) for ticket in tickets]
            self._send(delivery(tickets, answers), *groups)
        return len(tickets)

    def _acknowledged(self, outcomes: dict[str, str]) -> None:
        now = time.monotonic()
        for group_id, outcome in outcomes.items():
            if outcome != "ready":
                sys.exit(f"group {group_id}: {outcome}")
            self._held.discard(group_id)
            self._latencies_s.append(now - self._completed_at.pop(group_id))

    def _send(self, message: m.Message, *blobs: bytes) -> None:
        self._socket.send_multipart([encode(message), *blobs], copy=False)


def main(address: str, endpoint: str, run: str, credits: str) -> None:
    """Serves a `Workload` after the other from `address`; sends heartbeats meanwhile, until stopped."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as requests:
        requests.connect(address)
        with connect_dealer(context, endpoint, identity="bench") as socket:
            producer = Producer(socket, run, credits=int(credits))
            while True:
                if requests.poll(0):
                    (workload,) = msgspec.msgpack.decode(requests.recv(), type=tuple[Workload])
                    requests.send(msgspec.msgpack.encode(producer.run(workload)))
                producer.receive(timeout_s=POLL_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
