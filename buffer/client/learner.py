"""The learner's connection to the buffer service: leases, and what it says of its steps."""

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from slipstream.buffer.store.types import Lease
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.auth import client_keys
from slipstream.buffer.wire.codec import FrameError, decode, encode
from slipstream.buffer.wire.sockets import connect_dealer
from slipstream.configs import RunConfig, agreement
from slipstream.configs.runtime.errors import DeadlineError, RefusedError, SlipstreamError, StoppedError
from slipstream.configs.runtime.logging import WaitLog, get_log
from slipstream.configs.runtime.network import resolution_error

log = get_log("buffer.client")

RESEND_S = 2.0
STOPPING_REPLY_S = 5.0
REPEATED_REPORTS = (m.Throttle, m.Trained, m.Checkpointed, m.Published)
"""In this order: publishing starts the count of what was trained since."""
NUMBERED_LATER = 0
"""The request's number is given when it is sent."""


def new_incarnation() -> str:
    """What tells this learner from all others of its run."""
    return secrets.token_hex(8)


class BufferClient:
    """One blocking connection to the buffer service; for one thread.

    Raises, from every call: DeadlineError when the service does not answer in `buffer.reply_deadline_s`, or in
    `redis.outage_deadline_s` if it has answered before; RefusedError when it says no, as it does to a learner that was
    replaced by another one.
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
        name: of the connection, for the service's log.
        incarnation: of the learner that this is a further connection of; None: of a learner of its own.
        is_stopping: whether it is to end, and waits no longer than STOPPING_REPLY_S for an answer.
        """
        self._is_stopping = is_stopping
        self._run = config.run.name
        self._incarnation = incarnation or new_incarnation()
        self._step = 0
        self._model = ""
        self._settings = agreement.learner_settings(config)
        self._said: dict[type[m.Message], m.Message] = {}
        self._endpoint = config.buffer.endpoint
        self._deadline_s = config.buffer.reply_deadline_s
        self._awaited = WaitLog(log, "the buffer", address=self._endpoint)
        self._outage_deadline_s = max(config.redis.outage_deadline_s, self._deadline_s)
        self._given_up = threading.Event()
        # Never a number that another client used: a request that a network delivers again, late, is known by it.
        self._requests = itertools.count(secrets.randbits(62))
        self._evals: list[m.EvalReport] = []
        self._evals_seen: set[int] = set()
        keys = client_keys(config.security)
        self._context = zmq.Context()
        # Nobody else's: a learner that was cut off must not take its successor's route when it comes back.
        identity = f"{name}-{self._incarnation}"
        self._socket = connect_dealer(self._context, self._endpoint, identity=identity, keys=keys)

    def close(self) -> None:
        """Closes the connection."""
        self._context.destroy(linger=0)

    def give_up(self) -> None:
        """Ends the wait that another thread is in, with a DeadlineError there."""
        self._given_up.set()

    def hello(self, step: int, *, model: str = "") -> m.State:
        """Announces a learner that has `step` steps behind it: whoever was the run's learner is not any more.

        Args:
            model: fingerprint of the model that the run starts from; the service refuses another than the run began
                with. Empty: not told.
        """
        self._step, self._model = step, model
        state = self._state(self._hello())
        self.take_evals()  # those of before were for the learner that was here then
        return state

    def lease(self, step: int, *, count: int, consuming_version: int, wait_s: float) -> Lease | None:
        """`count` groups for `step`, None if too few become ready within `wait_s`."""
        request = m.LeaseRequest(
            request=NUMBERED_LATER,
            incarnation=self._incarnation,
            step=step,
            count=count,
            consuming_version=consuming_version,
            wait_s=wait_s,
        )
        reply = self._ask(request, extra_s=wait_s)
        return Lease(reply.group_ids, reply.importance_weights) if isinstance(reply, m.Lease) else None

    def trained(self, step: int) -> m.State:
        """The groups leased for `step` were trained on."""
        state = self._say(m.Trained(request=NUMBERED_LATER, incarnation=self._incarnation, step=step))
        self._step = step + 1
        return state

    def published(self, version: int, *, evaluate: bool) -> m.State:
        """The learner's weights are now `version`."""
        return self._say(
            m.Published(request=NUMBERED_LATER, incarnation=self._incarnation, version=version, evaluate=evaluate)
        )

    def throttle(self, max_staleness: int) -> m.State:
        """From now on no more is issued than this staleness allows, nor more than `buffer.max_staleness` does."""
        return self._say(m.Throttle(request=NUMBERED_LATER, incarnation=self._incarnation, max_staleness=max_staleness))

    def checkpointed(self, step: int) -> m.State:
        """A checkpoint that contains the first `step` steps is on disk."""
        return self._say(m.Checkpointed(request=NUMBERED_LATER, incarnation=self._incarnation, step=step))

    def repeat_reports(self) -> None:
        """What was said last of each kind, which changes nothing unless Redis has lost the end of its file since."""
        for message in self._to_say_again():
            self._state(message)

    def state(self) -> m.State:
        """The state of the buffer and its servers."""
        return self._state(m.StateRequest(request=NUMBERED_LATER))

    def take_evals(self) -> list[m.EvalReport]:
        """Evaluations that any answer has reported since the last call, each once."""
        evals, self._evals = self._evals, []
        return evals

    def finish(self) -> m.State:
        """Ends the run."""
        self.repeat_reports()  # what is leased goes back: it must not be what was trained
        return self._state(m.Finish(request=NUMBERED_LATER, incarnation=self._incarnation))

    def _hello(self) -> m.LearnerHello:
        return m.LearnerHello(
            request=NUMBERED_LATER,
            incarnation=self._incarnation,
            run=self._run,
            step=self._step,
            model_fingerprint=self._model,
            settings=self._settings,
        )

    def _say(self, message: m.Message) -> m.State:
        """Says what may have to be said again."""
        state = self._state(message)
        self._said[type(message)] = message
        return state

    def _to_say_again(self) -> list[m.Message]:
        return [self._said[kind] for kind in REPEATED_REPORTS if kind in self._said]

    def _state(self, message: m.Message) -> m.State:
        reply = self._ask(message)
        if isinstance(reply, m.UnknownPeer):
            log.warning("the buffer has forgotten this learner, which says hello again", step=self._step)
            for said in (self._hello(), *self._to_say_again()):
                self._ask(said)
            reply = self._ask(message)
        if not isinstance(reply, m.State):
            raise SlipstreamError(f"the buffer answered {type(reply).__name__} where State was due")
        self._evals += [report for report in reply.evals if report.version not in self._evals_seen]
        self._evals_seen.update(report.version for report in reply.evals)
        return reply

    def _ask(self, message: m.Message, *, extra_s: float = 0.0) -> Any:
        request = next(self._requests)
        frame = encode(msgspec.structs.replace(message, request=request))
        self._send(frame)
        deadline_s = self._deadline_s + extra_s
        started, until = time.monotonic(), time.monotonic() + deadline_s
        hurried = False
        failure: FrameError | None = None
        while True:
            if self._given_up.is_set():
                raise StoppedError("the learner stops")
            if self._is_stopping() and not hurried:
                hurried, until = True, min(until, time.monotonic() + STOPPING_REPLY_S)
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise failure or DeadlineError(
                    f"the buffer at {self._endpoint}{resolution_error(self._endpoint)} did not answer "
                    f"{type(message).__name__} within {round(until - started, 1):g} s; is it running, and is "
                    "security.keys the same on both sides?"
                )
            if not self._socket.poll(round(min(left_s, RESEND_S) * 1000)):
                if left_s < deadline_s - extra_s:  # it answers a request to wait by then
                    self._awaited.waiting(request=type(message).__name__)
                # A service that was restarted has forgotten the request; asked twice, it does the same once.
                if left_s > RESEND_S:
                    self._send(frame)
                continue
            try:
                reply = decode(self._socket.recv(), m.ToLearner)
            except FrameError as error:
                failure = error  # the request is sent again: if it was not the network, it is all that ever comes
                continue
            self._awaited.arrived()
            if reply.request != request:
                continue  # the late answer to a request that was given up
            if isinstance(reply, m.Refused):
                raise RefusedError(f"the buffer at {self._endpoint} refused: {reply.reason}")
            self._deadline_s = self._outage_deadline_s  # it was there: it may be away for a while, and come back
            return reply

    def _send(self, frame: bytes) -> None:
        # A service that has refused our key takes nothing any more; the deadline passes and is reported.
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, flags=zmq.NOBLOCK)
