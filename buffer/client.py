"""The learner's connections: to the buffer service, for leases and reports on its steps, and to Redis, which has the
bytes of leased groups.
"""

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from slipstream.buffer.store.redis import connect, group_key, retry_through_outage
from slipstream.buffer.store.types import LeasedGroups
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.auth import BUFFER, LEARNER, client_keys
from slipstream.buffer.wire.codec import FrameError, decode, decode_group, encode
from slipstream.buffer.wire.sockets import connect_dealer
from slipstream.configs import RunConfig, agreement
from slipstream.configs.runtime.errors import DeadlineError, RefusedError, SlipstreamError, StoppedError
from slipstream.configs.runtime.logging import WaitLog, get_log
from slipstream.configs.runtime.network import resolution_error
from slipstream.configs.schema.buffer import RedisConfig

log = get_log("buffer.client")

RESEND_S = 2.0
STOPPING_REPLY_S = 5.0
REPEATED_REPORTS = (m.Throttle, m.Trained, m.Checkpointed, m.Published)
"""Kinds of reports in the order of repetition: publishing resets the count of groups trained since."""
UNNUMBERED = 0
"""Placeholder; the request gets its number when it is sent."""


def new_incarnation() -> str:
    """A unique name for this start of the learner."""
    return secrets.token_hex(8)


class BufferClient:
    """One blocking connection to the buffer service; for one thread.

    Every call raises DeadlineError when the service does not answer in `buffer.reply_deadline_s`, or, once it has
    answered, in `redis.outage_deadline_s`; RefusedError when it refuses, such as a learner that was replaced.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        incarnation: str | None = None,
        *,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Args:
        name: name of the connection, for the service's log.
        incarnation: the learner's, if it has several connections; None: a new one.
        is_stopping: True once the learner stops; then calls wait at most STOPPING_REPLY_S for an answer.
        """
        self._is_stopping = is_stopping
        self._run = config.run.name
        self._incarnation = incarnation or new_incarnation()
        self._step = self._version = 0
        self._model, self._vocab_size, self._undo = "", 0, False
        self._settings = agreement.learner_settings(config) | agreement.host_settings(config)
        self._reports: dict[type[m.Message], m.Message] = {}
        self._endpoint = config.buffer.endpoint
        self._deadline_s = config.buffer.reply_deadline_s
        self._wait_log = WaitLog(log, "the buffer", address=self._endpoint)
        self._outage_deadline_s = max(config.redis.outage_deadline_s, self._deadline_s)
        self._given_up = threading.Event()
        # Random start, unlike any other client's numbers: a late repetition of a request is recognised by its number.
        self._requests = itertools.count(secrets.randbits(62))
        self._evals: list[m.EvalReport] = []
        self._evals_seen: set[int] = set()
        keys = client_keys(config.security, LEARNER, service=BUFFER)
        self._context = zmq.Context()
        # Unique: a disconnected learner must not take its successor's route when it reconnects.
        identity = f"{name}-{self._incarnation}"
        self._socket = connect_dealer(self._context, self._endpoint, identity=identity, keys=keys)

    def close(self) -> None:
        """Closes the connection."""
        self._context.destroy(linger=0)

    def give_up(self) -> None:
        """Ends another thread's wait with a StoppedError."""
        self._given_up.set()

    def hello(
        self, step: int, *, version: int = 0, model: str = "", vocab_size: int = 0, undo: bool = False
    ) -> m.State:
        """Registers a learner that has done `step` steps, in place of the run's earlier learner.

        Args:
            version: the last one that was published in these steps; 0 before the first.
            model: fingerprint of the run's initial model; the service refuses a different one. Empty: not compared.
            vocab_size: the model's number of token ids; likewise. 0: not compared.
            undo: undo later steps, even if a checkpoint contains them; else the service refuses this learner then.
        """
        self._step, self._version, self._model, self._vocab_size, self._undo = step, version, model, vocab_size, undo
        state = self._state(self._hello())
        self.take_evals()  # earlier ones were reported to the previous learner
        return state

    def lease(self, step: int, *, count: int, consuming_version: int, wait_s: float) -> LeasedGroups | None:
        """Leases `count` groups for `step`; None if too few become ready within `wait_s`."""
        request = m.LeaseRequest(
            request=UNNUMBERED,
            incarnation=self._incarnation,
            step=step,
            count=count,
            consuming_version=consuming_version,
            wait_s=wait_s,
        )
        reply = self._ask(request, extra_s=wait_s)
        if not isinstance(reply, m.Lease):
            return None
        return LeasedGroups(reply.group_ids, reply.importance_weights, reply.oldest_version, reply.staleness)

    def trained(self, step: int) -> m.State:
        """Reports that the groups leased for `step` were trained on."""
        state = self._report(m.Trained(request=UNNUMBERED, incarnation=self._incarnation, step=step))
        self._step = step + 1
        return state

    def published(self, version: int, *, evaluate: bool) -> m.State:
        """Reports that the learner's weights are now `version`."""
        message = m.Published(request=UNNUMBERED, incarnation=self._incarnation, version=version, evaluate=evaluate)
        state = self._report(message)
        self._version = version
        return state

    def throttle(self, max_staleness: int) -> m.State:
        """Limits new tickets to this staleness, if it is below `buffer.max_staleness`."""
        return self._report(m.Throttle(request=UNNUMBERED, incarnation=self._incarnation, max_staleness=max_staleness))

    def checkpointed(self, step: int) -> m.State:
        """Reports that a checkpoint with the first `step` steps is on disk."""
        return self._report(m.Checkpointed(request=UNNUMBERED, incarnation=self._incarnation, step=step))

    def repeat_reports(self) -> None:
        """Repeats the latest report of each kind; no effect unless Redis has lost the end of its file."""
        for message in self._latest_reports():
            self._state(message)

    def state(self) -> m.State:
        """The state of the buffer and its servers."""
        return self._state(m.StateRequest(request=UNNUMBERED))

    def take_evals(self) -> list[m.EvalReport]:
        """Evaluations in the answers since the last call, each once."""
        evals, self._evals = self._evals, []
        return evals

    def finish(self) -> m.State:
        """Ends the run."""
        self.repeat_reports()  # leased groups return to ready: trained ones must be recorded before
        return self._state(m.Finish(request=UNNUMBERED, incarnation=self._incarnation))

    def _hello(self) -> m.LearnerHello:
        return m.LearnerHello(
            request=UNNUMBERED,
            incarnation=self._incarnation,
            run=self._run,
            step=self._step,
            model_fingerprint=self._model,
            version=self._version,
            vocab_size=self._vocab_size,
            undo=self._undo,
            settings=self._settings,
        )

    def _report(self, message: m.Message) -> m.State:
        """Sends a report and keeps it for `repeat_reports`."""
        state = self._state(message)
        self._reports[type(message)] = message
        return state

    def _latest_reports(self) -> list[m.Message]:
        return [self._reports[kind] for kind in REPEATED_REPORTS if kind in self._reports]

    def _state(self, message: m.Message) -> m.State:
        reply = self._ask(message)
        if isinstance(reply, m.UnknownPeer):
            log.warning("the buffer has forgotten this learner; repeating the hello", step=self._step)
            for report in (self._hello(), *self._latest_reports()):
                self._ask(report)
            reply = self._ask(message)
        if not isinstance(reply, m.State):
            raise SlipstreamError(f"the buffer answered {type(reply).__name__} instead of State")
        self._evals += [report for report in reply.evals if report.version not in self._evals_seen]
        self._evals_seen.update(report.version for report in reply.evals)
        return reply

    def _ask(self, message: m.Message, *, extra_s: float = 0.0) -> Any:
        request = next(self._requests)
        frame = encode(msgspec.structs.replace(message, request=request))
        self._send(frame)
        deadline_s = self._deadline_s + extra_s
        started, until = time.monotonic(), time.monotonic() + deadline_s
        shortened = False
        failure: FrameError | None = None
        while True:
            if self._given_up.is_set():
                raise StoppedError("the learner stops")
            if self._is_stopping() and not shortened:
                shortened, until = True, min(until, time.monotonic() + STOPPING_REPLY_S)
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise failure or DeadlineError(
                    f"the buffer at {self._endpoint}{resolution_error(self._endpoint)} did not answer "
                    f"{type(message).__name__} within {round(until - started, 1):g} s; is it running, and is "
                    "security.keys the same on both sides?"
                )
            if not self._socket.poll(round(min(left_s, RESEND_S) * 1000)):
                if left_s < deadline_s - extra_s:  # a lease request is answered after its wait_s
                    self._wait_log.waiting(request=type(message).__name__)
                # A restarted service has no record of the request; repeating one has no further effect.
                if left_s > RESEND_S:
                    self._send(frame)
                continue
            try:
                reply = decode(self._socket.recv(), m.ToLearner)
            except FrameError as error:
                failure = error  # sent again, in case the network damaged the answer; raised at the deadline
                continue
            self._wait_log.arrived()
            if reply.request != request:
                continue  # a late answer to an earlier request
            if isinstance(reply, m.Refused):
                raise RefusedError(f"the buffer at {self._endpoint} refused: {reply.reason}")
            self._deadline_s = self._outage_deadline_s  # after a first answer, silence may be an outage
            return reply

    def _send(self, frame: bytes) -> None:
        # A service that has refused the key accepts nothing more; the deadline reports it.
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, flags=zmq.NOBLOCK)


class GroupReader:
    """Reads and decodes groups; one reader per learner rank."""

    def __init__(self, redis: RedisConfig, *, run: str) -> None:
        self._run = run
        self._config = redis
        self._given_up = threading.Event()
        self._redis = connect(redis)

    def give_up(self) -> None:
        """Ends another thread's wait for Redis with a StoppedError."""
        self._given_up.set()

    def read(self, group_ids: Sequence[str]) -> list[m.Group]:
        """The groups, in the order of their ids.

        Raises: SlipstreamError when one is not stored or Redis refuses the connection, DeadlineError when an outage of
        Redis is too long, StoppedError after `give_up`.
        """
        if not group_ids:
            return []
        blobs = retry_through_outage(self._config, lambda: self._blobs(group_ids), given_up=self._given_up)
        lost = [group_id for group_id, blob in zip(group_ids, blobs, strict=True) if blob is None]
        if lost:
            raise SlipstreamError(
                f"groups {', '.join(lost)} are leased but not stored; "
                "was Redis flushed, or does redis.url differ from the buffer's?"
            )
        blobs.reverse()
        # Popped, so that later groups reuse the memory: allocating new pages takes longer than decoding.
        return [decode_group(blobs.pop()) for _ in group_ids]

    def _blobs(self, group_ids: Sequence[str]) -> list[Any]:
        blobs: Any = self._redis.mget([group_key(self._run, group_id) for group_id in group_ids])
        return list(blobs)
