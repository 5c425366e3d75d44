"""Sharing of work among many rollout servers without engines, and its cost for the buffer."""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import mean, median, quantiles
from typing import Any

import msgspec
import psutil
import zmq.asyncio

from benchmarks.buffer_run import BufferWorkers
from benchmarks.figures import Figure, Figures, Goal
from benchmarks.producer import HEARTBEAT_S, delivery, hello, played, trajectories
from benchmarks.workers import cpu_s
from slipstream.buffer.client import BufferClient
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.sockets import connect_dealer, send_and_close
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import DeadlineError
from slipstream.configs.runtime.processes import raise_open_file_limit
from slipstream.configs.runtime.threads import cancel_tasks
from slipstream.tools.cli import at_least, seconds

ANSWERS, TOKENS = 2, 16
CREDITS = 8
WARM_UP_STEPS = 5
MOST = 1.2
"""Goal for the largest work of a server, divided by the mean."""
DEADLINE_S = 120.0


class SimulatedServer:
    """A rollout server that plays one group at a time, over the wire of the real one.

    Attributes:
        delivered: groups that the buffer acknowledged as ready.
        waits_s: from the server's last need of a ticket (it has joined, delivered or installed a version) to tickets.
    """

    def __init__(self, context: zmq.asyncio.Context, config: RunConfig, name: str, *, group_s: float) -> None:
        self.delivered = 0
        self.waits_s: list[float] = []
        self.joined = asyncio.Event()
        self._run = config.run.name
        self._name = name
        self._group_s = group_s
        self._version = 0
        self._answers = trajectories(ANSWERS, TOKENS)
        self._held: dict[str, m.Ticket] = {}
        self._waiting: asyncio.Queue[m.Ticket] = asyncio.Queue()
        self._needs_since, self._started_at = 0.0, time.monotonic()
        self._socket = connect_dealer(context, config.buffer.endpoint, identity=name)

    async def run(self) -> None:
        """Serves until cancelled, then leaves."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive())
                tasks.create_task(self._play())
                tasks.create_task(self._send_heartbeats())
        finally:
            send_and_close(self._socket, encode(m.ServerGoodbye(incarnation=self._name)))

    async def install(self, version: int) -> None:
        """Switches to a version."""
        self._version = version
        if self.joined.is_set():
            self._needs_since = time.monotonic()
            await self._report()

    async def _send_heartbeats(self) -> None:
        while True:
            if self.joined.is_set():
                await self._report()
            else:
                await self._socket.send(encode(hello(self._run, self._name)))
            await asyncio.sleep(HEARTBEAT_S)

    async def _report(self) -> None:
        status = m.ServerStatus(server=self._name, version=self._version, up_s=time.monotonic() - self._started_at)
        await self._socket.send(encode(m.Credits(capacity=CREDITS, status=status, held=list(self._held))))

    async def _receive(self) -> None:
        while True:
            match decode(await self._socket.recv(), m.ToServer):
                case m.Welcome(version=version):
                    self.joined.set()
                    await self.install(version)
                case m.Tickets(tickets=tickets):
                    self.waits_s.append(time.monotonic() - self._needs_since)
                    for ticket in tickets:
                        self._held[ticket.id] = ticket
                        self._waiting.put_nowait(ticket)
                case m.Acknowledge(outcomes=outcomes):
                    for group_id, outcome in outcomes.items():
                        self._held.pop(group_id, None)
                        self.delivered += outcome == "ready"
                case m.UnknownPeer():
                    self.joined.clear()

    async def _play(self) -> None:
        while True:
            ticket = await self._waiting.get()
            await asyncio.sleep(self._group_s)
            answers = [
                msgspec.structs.replace(
                    each, spans=[msgspec.structs.replace(span, version=ticket.version) for span in each.spans]
                )
                for each in self._answers
            ]
            self._needs_since = time.monotonic()
            await self._socket.send_multipart([encode(delivery([ticket], answers)), encode(played(ticket, answers))])


class SimulatedFleet:
    """Rollout servers in this process, which install each published version at once.

    Attributes:
        servers: by name; also those that have left.
    """

    def __init__(self, config: RunConfig) -> None:
        self.servers: dict[str, SimulatedServer] = {}
        self._config = config
        self._context = zmq.asyncio.Context()
        self._running: dict[str, asyncio.Task[None]] = {}

    async def join(self, group_s: Mapping[str, float]) -> None:
        """Starts servers, by name the seconds that a group takes; returns once all have joined."""
        for name, each_s in group_s.items():
            self.servers[name] = SimulatedServer(self._context, self._config, name, group_s=each_s)
            self._running[name] = asyncio.create_task(self.servers[name].run())
        async with asyncio.timeout(DEADLINE_S):
            for name in group_s:
                await self.servers[name].joined.wait()

    async def leave(self, names: Sequence[str]) -> None:
        """Stops servers. Raises: the error of one that has failed."""
        await cancel_tasks(*(self._running.pop(name) for name in names))

    async def close(self) -> None:
        """Stops all servers."""
        await self.leave(list(self._running))
        self._context.destroy(linger=0)

    def delivered(self) -> Counter[str]:
        """Groups by server."""
        return Counter({name: server.delivered for name, server in self.servers.items()})

    async def train(self, learner: BufferClient, steps: range, *, step_s: float) -> m.State:
        """Leases, confirms and publishes steps, at most one in `step_s`."""
        count = self._config.learner.groups_per_step
        for step in steps:
            next_at = time.monotonic() + step_s
            lease = await asyncio.to_thread(learner.lease, step, count=count, consuming_version=step, wait_s=DEADLINE_S)
            if lease is None:
                raise DeadlineError(f"no {count} groups became ready within {DEADLINE_S:g} s")
            await asyncio.sleep(next_at - time.monotonic())
            await asyncio.to_thread(learner.trained, step)
            state = await asyncio.to_thread(learner.published, step + 1, evaluate=False)
            for name in self._running:
                await self.servers[name].install(step + 1)
        return state


def spread(work: Counter[str], names: Collection[str]) -> float:
    """Largest work of one of the servers, divided by their mean."""
    return max(work[name] for name in names) / mean(work[name] for name in names)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The sizes of the fleet and of a step."""
    add = parser.add_argument
    add("--servers", type=at_least(1), default=256, help="rollout servers")
    add("--churn", type=at_least(1), default=50, help="servers that leave and join at once")
    add("--groups-per-step", type=at_least(1), default=128, help="groups per step")
    add("--steps", type=at_least(1), default=60, help="steps before and after the change")
    add("--step-s", type=seconds, default=0.5, help="least seconds of a step")
    add("--group-s", type=seconds, default=0.3, help="seconds that a server takes for a group")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures. Raises: SlipstreamError when a process fails."""
    raise_open_file_limit()
    with BufferWorkers.start() as workers:
        config = workers.config(
            group_size=ANSWERS, groups_per_step=options.groups_per_step, max_staleness=4, max_ready=None
        )
        with workers.service(config) as service:
            asyncio.run(_measure(config, psutil.Process(service.process.pid), options, figures))
    return {}


async def _measure(config: RunConfig, service: psutil.Process, options: argparse.Namespace, figures: Figures) -> None:
    fleet, learner = SimulatedFleet(config), BufferClient(config, "bench")
    warm_up, steps, step_s = WARM_UP_STEPS, options.steps, options.step_s
    try:
        await asyncio.to_thread(learner.hello, 0)
        names = [f"server{number}" for number in range(options.servers)]
        await fleet.join(dict.fromkeys(names, options.group_s))
        await fleet.train(learner, range(warm_up), step_s=step_s)
        for server in fleet.servers.values():
            server.waits_s.clear()
        before, cpu_before, began = fleet.delivered(), cpu_s(service), time.monotonic()
        await fleet.train(learner, range(warm_up, warm_up + steps), step_s=step_s)
        took_s, used_s = time.monotonic() - began, cpu_s(service) - cpu_before
        figures.show(*_steady(fleet, fleet.delivered() - before, took_s=took_s, used_s=used_s))
        left, new = names[: options.churn], [f"new{number}" for number in range(options.churn)]
        began = time.monotonic()
        await fleet.leave(left)
        await fleet.join(dict.fromkeys(new, options.group_s))
        figures.show(Figure(f"{len(new)} leave and {len(new)} join", time.monotonic() - began, "s"))
        before = fleet.delivered()
        state = await fleet.train(learner, range(warm_up + steps, warm_up + 2 * steps), step_s=step_s)
        even = spread(fleet.delivered() - before, [*names[options.churn :], *new])
        figures.show(
            Figure("work of a server after it, max/mean", even, "", Goal("<", MOST)),
            Figure("tickets reissued", state.counts.reissued),
            Figure("groups never used", state.counts.expired),
        )
    finally:
        await fleet.close()
        learner.close()


def _steady(fleet: SimulatedFleet, work: Counter[str], *, took_s: float, used_s: float) -> list[Figure]:
    waits_s = [wait for server in fleet.servers.values() for wait in server.waits_s]
    return [
        Figure("servers", len(fleet.servers)),
        Figure("groups", work.total() / took_s, "/s"),
        Figure("work of a server, max/mean", spread(work, fleet.servers), "", Goal("<", MOST)),
        Figure("work of a server, min/mean", min(work.values()) / mean(work.values())),
        Figure("service's CPU per 1,000 groups", 1e6 * used_s / work.total(), "ms"),
        Figure("need of a ticket to its grant, median", 1e3 * median(waits_s), "ms"),
        Figure("need of a ticket to its grant, p99", 1e3 * quantiles(waits_s, n=100)[98], "ms"),
    ]
