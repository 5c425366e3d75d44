"""A rollout server: plays the episodes of its tickets, delivers the groups, follows the learner's weights."""

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import zmq.asyncio

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.auth import client_keys
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.sockets import connect_dealer, send_last
from slipstream.configs import RunConfig, agreement
from slipstream.configs.runtime.errors import DeadlineError, RefusedError, SlipstreamError
from slipstream.configs.runtime.logging import LogInterval, WaitLog, get_log
from slipstream.env.base import Split
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.outbox import RESEND_S, Publisher
from slipstream.rollout_servers.rollouts.single_turn import EpisodeFailed, Player
from slipstream.rollout_servers.tickets import Concurrency, Setbacks, TicketBook
from slipstream.rollout_servers.weights.eval_hold import EvaluationHold
from slipstream.rollout_servers.weights.follower import WeightMember

log = get_log("rollout.server")

HEARTBEAT_S = 1.0
PRESSURE_INTERVAL_S = 1.0
"""Time between two readings of the engine's pressure."""
SAY_EVERY_S = 60.0
SILENCE_S = 600.0
"""A buffer that has no work to give says nothing; after so long it is asked whether it is there."""
HELLO_SHARE = 1 / 60
"""Of the silence, the next pause between two hellos: they wait in the socket's queue for a buffer that is away, which
must work them all off when it comes."""


@dataclass
class Work:
    """What the server has done so far, and whether it is at it."""

    ready_at: float = field(default_factory=time.monotonic)
    running: int = 0
    busy_since: float = 0.0
    busy_s: float = 0.0
    tokens: int = 0

    @contextmanager
    def episode(self) -> Iterator[None]:
        """Around an episode, or several of one ticket."""
        if not self.running:
            self.busy_since = time.monotonic()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.busy_s += time.monotonic() - self.busy_since

    def busy_so_far_s(self) -> float:
        """Time with at least one episode running."""
        return self.busy_s + (time.monotonic() - self.busy_since if self.running else 0.0)


class RolloutServer:
    """One engine's worth of episodes."""

    def __init__(self, config: RunConfig, name: str, player: Player, engine: RestartingEngine) -> None:
        """`player` plays with `engine`."""
        self._config = config
        self._name = name
        self._player = player
        self._engine = engine
        self._hello = m.ServerHello(
            run=config.run.name,
            env=config.env.name,
            env_fingerprint=player.env.fingerprint(),
            train_tasks=player.env.size("train"),
            eval_tasks=player.env.size("eval"),
            tokenizer_fingerprint=player.text.fingerprint(),
            incarnation=uuid.uuid4().hex,
            settings=agreement.server_settings(config),
        )
        self._goodbye = m.ServerGoodbye(incarnation=self._hello.incarnation)
        self._endpoint = config.buffer.endpoint_for(name)
        self._buffer = WaitLog(log, "the buffer", address=self._endpoint)
        self._welcome = False
        self._welcome_news = LogInterval(SAY_EVERY_S)  # while Redis is away it joins again every other second
        self._tickets = TicketBook()
        self._work = Work()
        self._setbacks = Setbacks()
        self._hold = EvaluationHold()
        self._concurrency = Concurrency(config.rollout.min_groups_in_flight, config.rollout.groups_in_flight)
        self._report = asyncio.Event()
        self._member = WeightMember(config, name, self._engine, self._hold, on_applied=self._report.set)

    async def run(self) -> None:
        """Serves until cancelled.

        Raises: RefusedError when the buffer refuses this server, DeadlineError when it takes nothing, EngineError when
        engine after engine dies.
        """
        context = zmq.asyncio.Context()
        try:
            self._socket = connect_dealer(
                context, self._endpoint, identity=self._name, keys=client_keys(self._config.security)
            )
            self._publisher = Publisher(self._send, resend_s=RESEND_S)
            async with asyncio.TaskGroup() as tasks:
                self._episodes = tasks
                tasks.create_task(self._publisher.run())
                tasks.create_task(self._member.run(context))
                tasks.create_task(self._keep_in_touch())
                tasks.create_task(self._heed_pressure())
                tasks.create_task(self._listen())
        except BaseExceptionGroup as group:
            raise _first(SlipstreamError, group) or group from None
        finally:
            if self._welcome:
                send_last(self._socket, encode(self._goodbye))
            context.destroy(linger=0)

    async def _listen(self) -> None:
        while True:
            try:
                message = decode(await self._socket.recv(), m.ToServer)
            except FrameError as error:
                log.warning("frame from the buffer dropped", reason=str(error))
                continue
            self._publisher.heard()
            self._handle(message)

    def _handle(self, message: Any) -> None:
        match message:
            case m.Tickets():
                for ticket in message.tickets:
                    self._begin(ticket, message.grant)
            case m.Acknowledge():
                for ticket_id in self._publisher.acknowledged(message.outcomes):
                    self._tickets.settle(ticket_id)
            case m.EvalDrained():
                self._hold.drained(message.version)
            case m.Welcome() if not self._welcome:
                self._buffer.arrived()
                if self._welcome_news.due():
                    log.info("joined the buffer", version=message.version)
                self._welcome = True
                self._publisher.resend_lost()
                self._report.set()
            case m.WhoAreYou() if self._welcome:
                self._welcome = False
                self._report.set()
            case m.Refused():
                raise RefusedError(f"the buffer at {self._endpoint} refused: {message.reason}")

    def _begin(self, ticket: m.Ticket, grant: str) -> None:
        if not self._tickets.accept(ticket.id, grant):
            log.info("ticket came twice", ticket=ticket.id)
            return
        if ticket.kind == m.EVAL:
            self._hold.started(ticket)
        self._episodes.create_task(self._play(ticket))

    async def _keep_in_touch(self) -> None:
        """Says hello until it is welcome, then how it does; in silence, it says hello again, less and less often."""
        while True:
            silence_s = self._publisher.silence_s
            if self._publisher.in_doubt or silence_s > SILENCE_S:
                self._welcome = False
            if not self._welcome:
                self._publisher.asks()
                self._buffer.waiting(request="ServerHello")
            await self._send([encode(self._credits() if self._welcome else self._hello)])
            pause_s = HEARTBEAT_S if self._welcome else max(HEARTBEAT_S, silence_s * HELLO_SHARE)
            try:
                async with asyncio.timeout(pause_s):
                    await self._report.wait()
            except TimeoutError:
                pass  # nothing changed: time for the next heartbeat
            self._report.clear()

    async def _heed_pressure(self) -> None:
        """Lets the buffer give this server fewer groups when its engine can't keep up with them."""
        while True:
            await asyncio.sleep(PRESSURE_INTERVAL_S)
            pressure = await self._engine.pressure()
            before = self._concurrency.limit
            limit = self._concurrency.observe(pressure, groups=len(self._tickets.held))
            if limit != before:
                log.info("groups in flight limited", limit=limit, before=before, **asdict(pressure))
                self._report.set()

    async def _play(self, ticket: m.Ticket) -> None:
        try:
            with self._work.episode():
                trajectories, baseline = await self._trajectories(ticket)
            if ticket.kind == m.EVAL:
                _require_version(ticket, trajectories)
        except EpisodeFailed as error:
            await self._setbacks.hold_back(error.reason)
            self._fail(ticket, error)
        else:
            self._setbacks.success()
            self._work.tokens += sum(sum(trajectory.action_mask) for trajectory in [*trajectories, *baseline])
            self._publisher.deliver(
                m.Group(
                    id=ticket.id,
                    kind=ticket.kind,
                    epoch=ticket.epoch,
                    indices=ticket.indices,
                    trajectories=trajectories,
                    missing=ticket.samples * len(ticket.indices) - len(trajectories),
                    greedy_reward=baseline[0].reward if baseline else None,
                )
            )

    async def _trajectories(self, ticket: m.Ticket) -> tuple[list[m.Trajectory], list[m.Trajectory]]:
        """The answers that a ticket asks for, and beside them the greedy one, if it asks for one.

        Of an evaluation those that there are: a held-out task that fails costs the others nothing.
        """
        split: Split = "eval" if ticket.kind == m.EVAL else "train"
        failed: list[EpisodeFailed] = []
        unanswered = set(ticket.indices)

        async def episode(index: int) -> list[m.Trajectory]:
            try:
                try:
                    answered = await self._player.answer(split, index, samples=ticket.samples)
                finally:
                    unanswered.discard(index)
                    if not unanswered and ticket.kind == m.EVAL:
                        self._hold.answered(ticket)
                return await self._player.score(answered)
            except EpisodeFailed as error:
                failed.append(error)
                if len(failed) == len(ticket.indices):
                    raise
                log.warning("held-out task failed", ticket=ticket.id, reason=error.reason, detail=error.detail)
                return []

        try:
            async with asyncio.TaskGroup() as tasks:
                episodes = [tasks.create_task(episode(index)) for index in ticket.indices]
                baselines = [
                    tasks.create_task(self._player.play(split, index, samples=1, greedy=True))
                    for index in ticket.indices
                    if ticket.greedy
                ]
        except BaseExceptionGroup as group:
            _, others = group.split(EpisodeFailed)
            raise others or _first(EpisodeFailed, group) or group from None
        return _answers(episodes), _answers(baselines)

    def _fail(self, ticket: m.Ticket, error: EpisodeFailed) -> None:
        log.warning("episode failed", ticket=ticket.id, reason=error.reason, detail=error.detail)
        # What an env or a reward says may be anything, lone surrogates and whole data sets included.
        detail = error.detail[: m.DETAIL_CHARACTERS].encode(errors="replace").decode()
        self._publisher.fail(m.GroupFailed(id=ticket.id, reason=error.reason, detail=detail, tokens=error.tokens))

    def _credits(self) -> m.Credits:
        # What would only wait for the next engine is better off with another server.
        capacity = self._concurrency.limit if self._engine.ready else 0
        return m.Credits(capacity=capacity, status=self._status(), held=self._tickets.held)

    def _status(self) -> m.ServerStatus:
        return m.ServerStatus(
            server=self._name,
            version=self._engine.version,
            tokens_generated=self._work.tokens,
            busy_s=self._work.busy_so_far_s(),
            up_s=time.monotonic() - self._work.ready_at,
            engine_deaths=self._engine.deaths,
            requests_restarted=self._engine.requests_restarted,
        )

    async def _send(self, frames: Sequence[bytes]) -> None:
        deadline_s = self._config.buffer.reply_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._socket.send_multipart(frames)
        except TimeoutError:
            # Not a buffer that is away: messages wait for that one. ZeroMQ has given up on the connection.
            raise DeadlineError(
                f"the buffer at {self._endpoint} took nothing for {deadline_s:g} s; is security.keys the same there?"
            ) from None


def _answers(episodes: Sequence["asyncio.Task[list[m.Trajectory]]"]) -> list[m.Trajectory]:
    """The trajectories of all tasks; their episodes are numbered through."""
    answers: list[m.Trajectory] = []
    for task in episodes:
        first = answers[-1].episode + 1 if answers else 0
        answers += [msgspec.structs.replace(each, episode=first + each.episode) for each in task.result()]
    return answers


def _require_version(ticket: m.Ticket, answers: Sequence[m.Trajectory]) -> None:
    """Raises: EpisodeFailed when some of the answers are not of the version that is evaluated."""
    others = {span.version for answer in answers for span in answer.spans} - {ticket.version}
    if others:
        detail = f"newer weights came while version {ticket.version} was evaluated: tokens are of {sorted(others)} too"
        raise EpisodeFailed("superseded", detail)


def _first(kind: type[Exception], group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """The first error of a kind in what a TaskGroup raised, None without one."""
    found: BaseException | None = group.subgroup(kind)
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
