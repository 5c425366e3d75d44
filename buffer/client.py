"""The learner's side of the buffer: control through the service, groups straight from Redis."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
import zmq

from slipstream.buffer.keys import group_key
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, decode_group, encode
from slipstream.configs import RunConfig
from slipstream.configs.errors import DeadlineError, RefusedError, SlipstreamError

RESEND_S = 5.0


class BufferClient:
    """One blocking connection to the buffer service; for one thread.

    Raises, from every call: DeadlineError when the service does not answer in `buffer.reply_deadline_s`, RefusedError
    when it says no.
    """

    def __init__(self, config: RunConfig, identity: str) -> None:
        self._run = config.run.name
        self._endpoint = config.buffer.endpoint
        self._deadline_s = config.buffer.reply_deadline_s
        self._requests = itertools.count(1)
        self._evals: list[m.EvalReport] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # linger=0: a service that is gone must not keep the learner from exiting.
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.connect(self._endpoint)

    def close(self) -> None:
        """Closes the connection."""
        self._context.destroy(linger=0)

    def hello(self, step: int) -> m.State:
        """Announces a learner that has `step` steps behind it."""
        return self._state(lambda request: m.LearnerHello(request=request, run=self._run, step=step))

    def lease(self, step: int, *, count: int, consuming_version: int, wait_s: float) -> list[str] | None:
        """Ids of `count` groups for `step`, None if too few become ready within `wait_s`."""
        reply = self._ask(
            lambda request: m.LeaseRequest(
                request=request, step=step, count=count, consuming_version=consuming_version, wait_s=wait_s
            ),
            extra_s=wait_s,
        )
        return reply.group_ids if isinstance(reply, m.Lease) else None

    def trained(self, step: int) -> m.State:
        """The groups leased for `step` were trained on."""
        return self._state(lambda request: m.Trained(request=request, step=step))

    def published(self, version: int, *, evaluate: bool) -> m.State:
        """The learner's weights are now `version`."""
        return self._state(lambda request: m.Published(request=request, version=version, evaluate=evaluate))

    def checkpointed(self, step: int) -> m.State:
        """A checkpoint that contains the first `step` steps is on disk."""
        return self._state(lambda request: m.Checkpointed(request=request, step=step))

    def state(self) -> m.State:
        """The state of the buffer and its servers."""
        return self._state(lambda request: m.StateRequest(request=request))

    def take_evals(self) -> list[m.EvalReport]:
        """Evaluations that any answer has reported since the last call; the service reports each once."""
        evals, self._evals = self._evals, []
        return evals

    def finish(self) -> m.State:
        """Ends the run."""
        return self._state(lambda request: m.Finish(request=request))

    def _state(self, message: Callable[[int], m.Message]) -> m.State:
        reply = self._ask(message)
        if not isinstance(reply, m.State):
            raise SlipstreamError(f"the buffer answered {type(reply).__name__} where State was due")
        self._evals += reply.evals
        return reply

    def _ask(self, message: Callable[[int], m.Message], *, extra_s: float = 0.0) -> Any:
        request = next(self._requests)
        frame = encode(message(request))
        self._socket.send(frame)
        until = time.monotonic() + self._deadline_s + extra_s
        while True:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(
                    f"the buffer at {self._endpoint} did not answer {type(message(request)).__name__} "
                    f"within {self._deadline_s + extra_s:g} s; is it running?"
                )
            if not self._socket.poll(round(min(left_s, RESEND_S) * 1000)):
                # A service that was restarted has forgotten the request; asked twice, it does the same once.
                if left_s > RESEND_S:
                    self._socket.send(frame)
                continue
            reply = decode(self._socket.recv(), m.ToLearner)
            if reply.request != request:
                continue  # the late answer to a request that was given up
            if isinstance(reply, m.Refused):
                raise RefusedError(f"the buffer at {self._endpoint} refused: {reply.reason}")
            return reply


class GroupReader:
    """Reads groups' bytes from Redis; one per learner rank."""

    def __init__(self, config: RunConfig) -> None:
        self._run = config.run.name
        self._redis = redis.Redis.from_url(config.redis.address, socket_timeout=config.redis.deadline_s)

    def read(self, group_ids: Sequence[str]) -> list[m.Group]:
        """The groups, in the order of their ids.

        Raises: SlipstreamError when one is not stored, redis.RedisError when Redis can't be reached.
        """
        if not group_ids:
            return []
        blobs: list[Any] = self._redis.mget([group_key(self._run, group_id) for group_id in group_ids])
        lost = [group_id for group_id, blob in zip(group_ids, blobs, strict=True) if blob is None]
        if lost:
            raise SlipstreamError(f"groups {', '.join(lost)} are leased but not stored; was Redis flushed?")
        return [decode_group(blob) for blob in blobs]
