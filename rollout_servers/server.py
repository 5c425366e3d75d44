"""A rollout server: plays the episodes of its tickets, delivers the groups, follows the learner's weights."""

import asyncio
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Final

import msgspec
import zmq.asyncio

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.auth import BUFFER, ROLLOUT, client_keys
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.sockets import connect_dealer, send_and_close
from slipstream.configs import RunConfig, agreement
from slipstream.configs.runtime.errors import CERTAIN, DeadlineError, RefusedError, SlipstreamError
from slipstream.configs.runtime.exposition import Reading
from slipstream.configs.runtime.logging import LogInterval, WaitLog, get_log
from slipstream.configs.runtime.tracing import span
from slipstream.configs.schema.buffer import BufferConfig
from slipstream.configs.schema.rollout import EngineConfig
from slipstream.configs.schema.weights import SecurityConfig
from slipstream.env.base import Env
from slipstream.models.folder import model_fingerprint
from slipstream.models.gpus import visible_gpus
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers.concurrency import ConcurrencyLimiter
from slipstream.rollout_servers.engines.base import Pressure
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.plugins import plugin_code
from slipstream.rollout_servers.rollouts.base import SILENT, EpisodeFailed, first_error
from slipstream.rollout_servers.rollouts.gateway.listener import serving
from slipstream.rollout_servers.rollouts.player import Player, play_group
from slipstream.rollout_servers.tally import EXAMINED, Tally
from slipstream.rollout_servers.tickets import (
    EXAMINED_TASKS,
    FIRST_GROUPS,
    REMEDIES,
    RESEND_S,
    FailureBackoff,
    FirstFailures,
    Outbox,
    TicketBook,
)
from slipstream.rollout_servers.weights.eval_hold import EvaluationHold
from slipstream.rollout_servers.weights.follower import WeightFollower

log = get_log("rollout.server")

HEARTBEAT_S = 1.0
PRESSURE_INTERVAL_S = 1.0
"""Time between two readings of the engine's pressure."""
JOINED_LOG_EVERY_S = 60.0
SILENCE_S = 600.0
"""A buffer without work sends nothing; after so long the server sends it a hello."""
CHECK_S = 2.0
"""A buffer that does not answer for so long is not waited for before the engine starts."""
HELLO_SHARE = 1 / 60
"""Pause between two hellos, as a share of the silence: hellos to an absent buffer queue up in the socket, and it must
handle all of them when it returns."""

METRICS: Final[Mapping[str, tuple[str, str, bool]]] = {
    "version": ("policy_version", "policy version that new tokens come from", False),
    "tokens_generated": ("tokens", "action tokens of groups that were played", True),
    "busy_s": ("busy_seconds", "time with at least one running episode", True),
    "up_s": ("up_seconds", "time since the engine was ready", True),
    "groups_limit": ("groups_limit", "groups that it may have in flight", False),
    "engine_deaths": ("engine_restarts", "crashes of the engine, each followed by a restart", True),
    "requests_restarted": ("requests_restarted", "requests that lost their tokens in a crash", True),
    "prompt_tokens": ("prompt_tokens", "prompt tokens of answers, those of earlier turns included", True),
    "cached_tokens": ("cached_tokens", "those of them that the engine had in its KV cache", True),
    "kv_cache_use": ("kv_cache_ratio", "used share of the engine's KV cache", False),
    "running": ("answers_running", "answers that are being generated", False),
    "waiting": ("answers_waiting", "answers that wait for room in the engine", False),
}
"""For Prometheus, by the field of the server's status: name, meaning, whether it only grows."""


@dataclass
class Activity:
    """The server's work since its start."""

    ready_at: float = field(default_factory=time.monotonic)
    tokens: int = 0
    groups: int = 0
    """Train groups that were played."""
    _running: int = 0
    _busy_since: float = 0.0
    _busy_s: float = 0.0

    @contextmanager
    def group(self) -> Iterator[None]:
        """Around the work on one ticket."""
        if not self._running:
            self._busy_since = time.monotonic()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._busy_s += time.monotonic() - self._busy_since

    @property
    def busy_s(self) -> float:
        """Seconds with at least one group in work."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)


def server_hello(config: RunConfig, env: Env, tokenizer: Tokenizer) -> m.ServerHello:
    """The hello of a server that plays `env`."""
    return m.ServerHello(
        run=config.run.name,
        env=config.env.name,
        env_fingerprint=env.fingerprint(),
        train_tasks=env.size("train"),
        eval_tasks=env.size("eval"),
        tokenizer_fingerprint=tokenizer.fingerprint(),
        vocab_size=tokenizer.vocab_size,
        incarnation=uuid.uuid4().hex,
        model_fingerprint=model_fingerprint(tokenizer.model),
        settings=agreement.server_settings(config)
        | agreement.host_settings(config)
        | plugin_code(config.env, (*config.rewards, *config.evaluated)),
    )


def engine_gpus(engine: EngineConfig) -> list[str]:
    """Identities of the GPUs that an engine uses, of those that this process may use."""
    return [gpu.id for gpu in visible_gpus()[: engine.gpus]]


async def require_accepted(buffer: BufferConfig, security: SecurityConfig, name: str, hello: m.ServerHello) -> None:
    """Sends a hello and a goodbye, before the engine is loaded; no answer within CHECK_S counts as acceptance.

    Raises: RefusedError when the buffer refuses the server.
    """
    context = zmq.asyncio.Context()
    # A name of its own: the buffer may not have noticed the end of this connection when the server joins.
    keys = client_keys(security, ROLLOUT, service=BUFFER)
    socket = connect_dealer(context, buffer.endpoint, identity=f"{name}-check", keys=keys)
    try:
        async with asyncio.timeout(CHECK_S):
            await socket.send(encode(hello))
            answer = decode(await socket.recv(), m.ToServer)
    except (TimeoutError, FrameError) as error:
        log.info("not checked by the buffer before the engine starts", reason=str(error) or type(error).__name__)
        return
    else:
        if isinstance(answer, m.Refused):
            raise _refusal(buffer, answer)
        send_and_close(socket, encode(m.ServerGoodbye(incarnation=hello.incarnation)))
    finally:
        context.destroy(linger=0)


def _refusal(buffer: BufferConfig, answer: m.Refused) -> RefusedError:
    return RefusedError(f"the buffer at {buffer.endpoint} refused: {answer.reason}")


class EveryTaskFails(SlipstreamError):
    """No task of the env can be played with this model and these settings; the message has reason and remedy."""

    exit_code = CERTAIN


class Left(Exception):
    """The server leaves: no group is in work any more, or its notice is over."""


class RolloutServer:
    """Connects one engine's player to the buffer and to the learner."""

    def __init__(self, config: RunConfig, name: str, player: Player, engine: RestartingEngine) -> None:
        """`player` plays with `engine`; `name` is unique within the run."""
        self._config = config
        self._name = name
        self._player = player
        self._engine = engine
        self._hello = server_hello(config, player.env, player.tokenizer)
        self._endpoint = config.buffer.endpoint
        self._buffer_log = WaitLog(log, "the buffer", address=self._endpoint)
        self._joined_log = LogInterval(JOINED_LOG_EVERY_S)  # while Redis is away the server joins every other second
        self._is_welcome = False
        self._tickets = TicketBook()
        self._activity = Activity()
        self._backoff = FailureBackoff()
        self._first = FirstFailures()
        self._hold = EvaluationHold(hold_s=config.eval_hold_s)
        self._limiter = ConcurrencyLimiter.of(config.rollout)
        self._pressure: Pressure | None = None
        self._gpus = engine_gpus(config.rollout.engine)
        self._report = asyncio.Event()
        self._leaving = asyncio.Event()
        self._settled = asyncio.Event()
        """Set by each answer to groups."""
        self._follower = WeightFollower(config, name, engine, self._hold, on_applied=self._report.set)

    @property
    def is_leaving(self) -> bool:
        """True once `leave` was called."""
        return self._leaving.is_set()

    def readings(self) -> Iterator[Reading]:
        """Metrics for Prometheus."""
        # Not `_credits`: Prometheus is answered in a thread, and the tallies change while that counts their tokens.
        status = msgspec.structs.asdict(self._status())
        for key, (name, meaning, counts) in METRICS.items():
            if status.get(key) is not None:
                yield Reading(f"server_{name}", meaning, status[key], counts=counts)
        yield Reading("server_tickets", "tickets that the server holds", len(self._tickets.held))
        yield Reading("server_groups", "groups to train on that were played", self._activity.groups, counts=True)
        yield Reading("server_weight_updates", "updates of the weights", self._follower.updates, counts=True)
        yield Reading("server_stall_seconds", "pauses of generation in them", self._follower.stalls_s, counts=True)
        if self._player.gateway is not None:
            yield from self._player.gateway.readings()

    def leave(self) -> None:
        """Takes no further tickets; `run` returns once the groups in work are delivered, or `rollout.notice_s` is over.

        Tickets that are held then are issued again at once.
        """
        self._leaving.set()

    async def run(self) -> None:
        """Serves until cancelled, or asked to leave.

        Raises: RefusedError when the buffer refuses this server, DeadlineError when it accepts no messages, EngineError
        when the engine crashes too often, EveryTaskFails.
        """
        context = zmq.asyncio.Context()
        try:
            keys = client_keys(self._config.security, ROLLOUT, service=BUFFER)
            self._socket = connect_dealer(context, self._endpoint, identity=self._name, keys=keys)
            self._outbox = Outbox(self._send, resend_s=RESEND_S)
            async with serving(self._player.gateway, self._config, self._name), asyncio.TaskGroup() as tasks:
                self._groups = tasks
                tasks.create_task(self._outbox.run())
                tasks.create_task(self._follower.run(context))
                tasks.create_task(self._send_heartbeats())
                tasks.create_task(self._limit_concurrency())
                tasks.create_task(self._receive())
                tasks.create_task(self._leave())
        except BaseExceptionGroup as errors:
            if errors.subgroup(Left) is None:
                raise first_error(SlipstreamError, errors) or errors from None
        finally:
            if self._is_welcome:
                goodbye = m.ServerGoodbye(incarnation=self._hello.incarnation, sampled=self._tickets.sampled)
                send_and_close(self._socket, encode(goodbye))
            context.destroy(linger=0)

    async def _leave(self) -> None:
        """Raises: Left."""
        await self._leaving.wait()
        self._report.set()  # the buffer reads of no more capacity
        notice_s, groups = self._config.rollout.notice_s, len(self._tickets.held)
        log.info("rollout server leaves", groups_in_work=groups, notice_s=notice_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(notice_s):
                while self._tickets.held:
                    await self._settled.wait()
                    self._settled.clear()
        raise Left

    async def _receive(self) -> None:
        while True:
            try:
                message = decode(await self._socket.recv(), m.ToServer)
            except FrameError as error:
                log.warning("frame from the buffer dropped", reason=str(error))
                continue
            self._outbox.record_receipt()
            self._handle(message)

    def _handle(self, message: object) -> None:
        match message:
            case m.Tickets():
                for ticket in message.tickets:
                    self._accept(ticket, message.grant)
            case m.Acknowledge():
                for ticket_id in self._outbox.acknowledge(message.outcomes):
                    self._tickets.settle(ticket_id)
                self._settled.set()
            case m.EvalDrained():
                self._hold.drained(message.version)
            case m.Welcome() if not self._is_welcome:
                self._buffer_log.arrived()
                if self._joined_log.due():
                    log.info("joined the buffer", version=message.version)
                self._is_welcome = True
                self._outbox.resend_lost()
                self._report.set()
            case m.UnknownPeer() if self._is_welcome:
                self._is_welcome = False
                self._report.set()
            case m.Refused():
                raise _refusal(self._config.buffer, message)

    def _accept(self, ticket: m.Ticket, grant: str) -> None:
        if self.is_leaving:  # it is issued again once the server has left
            return
        tally = self._tickets.accept(ticket.id, grant, taken_over=sum(event.tokens for event in ticket.events))
        if tally is None:
            log.info("repeated ticket ignored", ticket=ticket.id)
            return
        if ticket.kind == m.EVAL:
            self._hold.started(ticket)
        self._groups.create_task(self._play(ticket, tally))

    async def _play(self, ticket: m.Ticket, tally: Tally) -> None:
        """Plays a ticket and queues its group, or its failure."""
        try:
            traced_by = span(
                "group", of=("group", ticket.id), root=True, kind=ticket.kind, server=self._name, version=ticket.version
            )
            with self._activity.group(), traced_by as traced:
                group = await play_group(
                    self._player,
                    ticket,
                    tally,
                    on_generated=lambda: self._hold.answered(ticket),
                    keep=self._outbox.keep,
                )
                traced.note(tokens=tally.sampled)
        except EpisodeFailed as error:
            if self._first.record_failure(error.reason):
                await self._require_playable(error, tally)
            if error.reason != SILENT:  # nobody came, which is no fault of this server
                await self._backoff.wait(error.reason)
            log.warning("group failed", ticket=ticket.id, reason=error.reason, detail=error.detail)
            # Errors of user code may contain anything, lone surrogates and whole data sets included.
            detail = error.detail[: m.DETAIL_CHARACTERS].encode(errors="replace").decode()
            failed = m.GroupFailed(
                id=ticket.id,
                kind=ticket.kind,
                reason=error.reason,
                detail=detail,
                tokens=tally.sampled,
                lengths=list(error.lengths),
                sampled={tally.env or "": {ticket.id: tally.sampled}},
                unused=dict(tally.unused),
                reissue=error.reason == SILENT,
            )
            self._outbox.fail(failed)
        else:
            self._backoff.record_success()
            if ticket.kind != m.EVAL:  # of the held-out tasks one may work, and no other
                self._first.record_success()
                self._activity.groups += 1
            self._activity.tokens += tally.sampled
            self._outbox.deliver(group, {tally.env or "": {ticket.id: tally.sampled}})

    async def _require_playable(self, failure: EpisodeFailed, tally: Tally) -> None:
        """Plays other train tasks, until one does not fail as the first groups did; `tally` counts their tokens.

        Raises: EveryTaskFails, EngineError.
        """
        size = self._player.env.size("train")
        others = random.Random(self._config.run.seed).sample(range(size), min(size, EXAMINED_TASKS))
        for index in others:
            try:
                with tally.part() as tokens:
                    await self._player.generate("train", index, samples=1, tally=tokens)
            except EpisodeFailed as error:
                if error.reason == failure.reason:
                    continue
            finally:
                tally.lose(EXAMINED)
            log.info("the first groups failed, but not every task does", reason=failure.reason)
            return
        raise EveryTaskFails(
            f"every task fails with {failure.reason}, the first {FIRST_GROUPS} groups and {len(others)} others: "
            f"{failure.detail}; {REMEDIES[failure.reason]} (`slipstream check` shows a prompt)"
        )

    async def _send_heartbeats(self) -> None:
        """Sends hellos until the server is welcome, then credits; on silence hellos again, with growing pauses."""
        while True:
            silence_s = self._outbox.silence_s
            if self._outbox.overdue or silence_s > SILENCE_S:
                self._is_welcome = False
            if not self._is_welcome:
                self._outbox.record_hello()
                self._buffer_log.waiting(request="ServerHello")
            await self._send([encode(self._credits() if self._is_welcome else self._hello)])
            pause_s = HEARTBEAT_S if self._is_welcome else max(HEARTBEAT_S, silence_s * HELLO_SHARE)
            try:
                async with asyncio.timeout(pause_s):
                    await self._report.wait()
            except TimeoutError:
                pass  # nothing changed: time for the next heartbeat
            self._report.clear()

    async def _limit_concurrency(self) -> None:
        """Adapts the server's credits to the load of its engine; during an evaluation that is not the groups'."""
        while True:
            await asyncio.sleep(PRESSURE_INTERVAL_S)
            self._pressure = pressure = await self._engine.pressure()
            if self._hold.evaluating:
                self._limiter.pause()
                continue
            groups = len(self._tickets.held)
            move = self._limiter.observe(pressure, groups=groups, finished=self._activity.groups)
            if move is not None:
                log.info("limit of groups in flight moved", **asdict(move), groups=groups, **asdict(pressure))
                self._report.set()

    def _credits(self) -> m.Credits:
        # While the engine restarts, groups would only wait here: other servers can play them.
        capacity = self._limiter.limit if self._engine.ready and not self.is_leaving else 0
        tickets = self._tickets
        return m.Credits(capacity=capacity, status=self._status(), held=tickets.held, sampled=tickets.sampled)

    def _status(self) -> m.ServerStatus:
        pressure = self._pressure if self._engine.ready else None
        return m.ServerStatus(
            server=self._name,
            version=self._engine.version,
            tokens_generated=self._activity.tokens,
            busy_s=self._activity.busy_s,
            up_s=time.monotonic() - self._activity.ready_at,
            groups_limit=self._limiter.limit,
            engine_deaths=self._engine.crashes,
            requests_restarted=self._engine.requests_restarted,
            prompt_tokens=self._engine.prompt_tokens,
            cached_tokens=self._engine.cached_tokens,
            kv_cache_use=None if pressure is None else pressure.kv_cache_usage,
            running=None if pressure is None else pressure.running,
            waiting=None if pressure is None else pressure.waiting,
            stall_s=self._follower.stall_s,
            update_s=self._follower.update_s,
            gpus=self._gpus,
        )

    async def _send(self, frames: Sequence[bytes]) -> None:
        deadline_s = self._config.buffer.reply_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._socket.send_multipart(frames)
        except TimeoutError:
            # Messages to an absent buffer are queued: here ZeroMQ has given up the connection itself.
            raise DeadlineError(
                f"the buffer at {self._endpoint} accepted no message for {deadline_s:g} s; is security.keys the same "
                "there?"
            ) from None
