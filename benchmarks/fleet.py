"""`slipstream bench fleet`: how the buffer shares work among many rollout servers, and what that costs."""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import mean, median, quantiles

import msgspec
import psutil
import zmq.asyncio

from slipstream.buffer.client.learner import BufferClient
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.sockets import connect_dealer, send_and_close
from slipstream.configs import RunConfig
from slipstream.configs.load import dump_config
from slipstream.configs.runtime.errors import DeadlineError
from slipstream.configs.runtime.processes import raise_open_file_limit
from slipstream.configs.runtime.threads import cancel_tasks
from benchmarks.end_to_end import cpu_s, fixture
from benchmarks.figures import Figure, Figures, Goal, bench_parser
from benchmarks.producer import VOCABULARY, trajectories
from slipstream.tools.cli import at_least, seconds

HEARTBEAT_S = 1.0
TASKS = 1000
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
        hello = m.ServerHello(
            run=self._run, env="bench", env_fingerprint="bench", train_tasks=TASKS, eval_tasks=0,
            tokenizer_fingerprint="bench", vocab_size=VOCABULARY, incarnation=self._name,
        )  # fmt: skip
        while True:
            if self.joined.is_set():
                await self._report()
            else:
                await self._socket.send(encode(hello))
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
            group = m.Group(
                id=ticket.id, kind=ticket.kind, epoch=ticket.epoch, indices=ticket.indices, trajectories=answers
            )
            self._needs_since = time.monotonic()
            await self._socket.send_multipart([encode(m.Deliver(ids=[ticket.id])), encode(group)])


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


def command(argv: Sequence[str]) -> int:
    """Measures, prints and saves all figures; returns 0, also when goals are missed.

    Raises: SlipstreamError when a process fails.
    """
    arguments = _parser().parse_args(argv)
    raise_open_file_limit()
    figures = Figures()
    with fixture() as bench:
        config = _config(bench.config(group_size=ANSWERS, max_ready=None), groups_per_step=arguments.groups_per_step)
        file = bench.folder / f"{config.run.name}.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        with bench.process("service", "slipstream.buffer.cli", str(file)) as service:
            asyncio.run(_measure(config, psutil.Process(service.process.pid), arguments, figures))
    figures.save_bench("fleet", arguments, details={})
    return 0


def _config(config: RunConfig, *, groups_per_step: int) -> RunConfig:
    """The default bound of staleness, with steps of this size."""
    buffer = config.buffer.model_copy(update={"max_staleness": 4})
    learner = config.learner.model_copy(update={"groups_per_step": groups_per_step})
    return config.model_copy(update={"buffer": buffer, "learner": learner})


async def _measure(config: RunConfig, service: psutil.Process, arguments: argparse.Namespace, figures: Figures) -> None:
    fleet, learner = SimulatedFleet(config), BufferClient(config, "bench")
    warm_up, steps, step_s = WARM_UP_STEPS, arguments.steps, arguments.step_s
    try:
        await asyncio.to_thread(learner.hello, 0)
        names = [f"server{number}" for number in range(arguments.servers)]
        await fleet.join(dict.fromkeys(names, arguments.group_s))
        await fleet.train(learner, range(warm_up), step_s=step_s)
        for server in fleet.servers.values():
            server.waits_s.clear()
        before, cpu_before, began = fleet.delivered(), cpu_s(service), time.monotonic()
        await fleet.train(learner, range(warm_up, warm_up + steps), step_s=step_s)
        took_s, used_s = time.monotonic() - began, cpu_s(service) - cpu_before
        figures.show(_steady(fleet, fleet.delivered() - before, took_s=took_s, used_s=used_s))
        left, new = names[: arguments.churn], [f"new{number}" for number in range(arguments.churn)]
        began = time.monotonic()
        await fleet.leave(left)
        await fleet.join(dict.fromkeys(new, arguments.group_s))
        figures.show([Figure(f"{len(new)} leave and {len(new)} join", time.monotonic() - began, "s")])
        before = fleet.delivered()
        state = await fleet.train(learner, range(warm_up + steps, warm_up + 2 * steps), step_s=step_s)
        even = spread(fleet.delivered() - before, [*names[arguments.churn :], *new])
        figures.show(
            [
                Figure("work of a server after it, max/mean", even, "", Goal("<", MOST)),
                Figure("tickets reissued", state.counts.reissued, ""),
                Figure("groups never used", state.counts.expired, ""),
            ]
        )
    finally:
        await fleet.close()
        learner.close()


def _steady(fleet: SimulatedFleet, work: Counter[str], *, took_s: float, used_s: float) -> list[Figure]:
    waits_s = [wait for server in fleet.servers.values() for wait in server.waits_s]
    return [
        Figure("servers", len(fleet.servers), ""),
        Figure("groups", work.total() / took_s, "/s"),
        Figure("work of a server, max/mean", spread(work, fleet.servers), "", Goal("<", MOST)),
        Figure("work of a server, min/mean", min(work.values()) / mean(work.values()), ""),
        Figure("service's CPU per 1,000 groups", 1e6 * used_s / work.total(), "ms"),
        Figure("need of a ticket to its grant, median", 1e3 * median(waits_s), "ms"),
        Figure("need of a ticket to its grant, p99", 1e3 * quantiles(waits_s, n=100)[98], "ms"),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("fleet", "Measure the sharing of work.")
    add = parser.add_argument
    add("--servers", type=at_least(1), default=256, help="rollout servers (default: 256)")
    add("--churn", type=at_least(1), default=50, help="servers that leave and join at once (default: 50)")
    add("--groups-per-step", type=at_least(1), default=128, help="groups per step (default: 128)")
    add("--steps", type=at_least(1), default=60, help="steps before and after the change (default: 60)")
    add("--step-s", type=seconds, default=0.5, help="least seconds of a step (default: 0.5)")
    add("--group-s", type=seconds, default=0.3, help="seconds that a server takes for a group (default: 0.3)")
    return parser
