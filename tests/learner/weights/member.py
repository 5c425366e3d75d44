"""A rollout server's side of the weight channel, without an engine: it keeps the tensors of every version."""

import os
import signal
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq
from torch import Tensor

from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.messages import Message
from slipstream.buffer.wire.weights import protocol as w
from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.buffer.wire.weights.layout import host_identity
from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.weights.receivers import build_receivers

JOIN_S = 0.2


def honest(answer: Message) -> Message | None:
    """Every answer as it is."""
    return answer


def nothing() -> None:
    """The default of the moments."""


class Member:
    """Speaks the control protocol and receives through the real transports, until it is closed.

    Attributes:
        received: the tensors of each version that was applied.
        announced: version and transport of each announcement, in their order.
        queued: its places in the queue.
        evictions: why it was evicted.
        incarnation: a new one says that its engine was started anew, an empty one that it is dead.
        before_entering, after_ready, before_loading, before_applying: called at these moments of every transfer.
        holding: whether it keeps its version for an evaluation.
        says: what becomes of its answers; None keeps one back.
    """

    def __init__(self, config: RunConfig, name: str, *, transports: tuple[str, ...] = ("gloo", "stream")) -> None:
        self.received: dict[int, dict[str, Tensor]] = {}
        self.announced: list[tuple[int, str]] = []
        self.queued: list[int] = []
        self.evictions: list[str] = []
        self.changed = threading.Condition()
        self.incarnation = uuid.uuid4().hex
        self.before_entering: Callable[[], None] = nothing
        self.after_ready: Callable[[], None] = nothing
        self.before_loading: Callable[[], None] = nothing
        self.before_applying: Callable[[], None] = nothing
        self.says: Callable[[Any], Message | None] = honest
        self.leaves = False
        self.holding = False
        self.version = 0
        self._config = config
        self._name = name
        self._transports = transports
        self._receivers = build_receivers(config.security)
        self._staging = Staging(config.run.name, shared=False)
        self._announce: w.Announce
        self._closing = threading.Event()
        self._background = ThreadPoolExecutor(1)
        self._answers: list[Message] = []
        self._thread = threading.Thread(target=self.run)

    def start(self) -> "Member":
        """Follows the learner in a thread."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends; says so before if `leaves`."""
        self._closing.set()
        for receiver in self._receivers.values():
            receiver.close()
        self._thread.join()
        self._background.shutdown(wait=True)

    def restart(self) -> None:
        """Holds nothing any more, as after a restart of its engine."""
        self.version, self.incarnation = 0, uuid.uuid4().hex

    def wait_for(self, version: int, deadline_s: float = 60.0) -> dict[str, Tensor]:
        """The tensors of `version`, once it is applied."""
        with self.changed:
            assert self.changed.wait_for(lambda: version in self.received, deadline_s), (
                f"{self._name} has {sorted(self.received)} after {deadline_s} s, not {version}"
            )
        return self.received[version]

    def wait_until_announced(self, version: int, deadline_s: float = 60.0) -> None:
        """Returns once `version` is announced."""
        with self.changed:
            assert self.changed.wait_for(lambda: version in dict(self.announced), deadline_s), f"no {version}"

    def run(self) -> None:
        """Follows the learner."""
        weights = self._config.weights
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IDENTITY, self._name.encode())
            socket.connect(f"tcp://{weights.host}:{weights.control_port}")
            while not self._closing.is_set():
                socket.send(encode(self._join()))
                self._say(socket)
                if socket.poll(round(JOIN_S * 1000)):
                    self._hear(decode(socket.recv(), w.FromLearner))
                    self._say(socket)
            if self.leaves:
                socket.setsockopt(zmq.LINGER, 5000)
                socket.send(encode(w.Leave()))

    def _say(self, socket: Any) -> None:
        while self._answers:
            answer = self.says(self._answers.pop(0))
            if answer is not None:
                socket.send(encode(answer))
            if isinstance(answer, w.Ready):
                self.after_ready()

    def _join(self) -> w.Join:
        return w.Join(
            run=self._config.run.name, server=self._name, incarnation=self.incarnation, version=self.version,
            staged=self._staging.version, host=host_identity(), device=host_identity(),
            transports=list(self._transports), workers=1, holding=self.holding,
        )  # fmt: skip

    def _hear(self, message: Any) -> None:
        match message:
            case w.Form():
                self._background.submit(self._enter, message)
            case w.Announce(manifest=manifest):
                with self.changed:
                    self.announced.append((manifest.version, message.transport))
                    self.changed.notify_all()
                self._announce = message
                self._answers.append(w.Ready(transfer=message.transfer, version=manifest.version))
                if message.source is not None:
                    self._background.submit(self._receive, message)
            case w.Sending():
                self._background.submit(self._receive, self._announce)
            case w.Apply():
                self.before_applying()
                with self.changed:
                    tensors = self._staging.named_tensors(self._announce.manifest)
                    self.received[message.version] = {name: tensor.clone() for name, tensor in tensors}
                    self.version = message.version
                    self.changed.notify_all()
                self._answers.append(
                    w.Applied(
                        transfer=message.transfer, version=message.version, stall_s=0.125, verified=w.NOT_VERIFIED
                    )
                )
            case w.Queued():
                self.queued.append(message.ahead)
            case w.Evicted():
                self.evictions.append(message.reason)

    def _enter(self, form: w.Form) -> None:
        self.before_entering()
        try:
            self._receivers[form.transport].enter(form)
        except TransferError as error:
            self._answers.append(w.Failed(transfer=form.transfer, stage="form", detail=str(error)))
        else:
            self._answers.append(w.Entered(transfer=form.transfer))

    def _receive(self, announce: w.Announce) -> None:
        self.before_loading()
        try:
            self._receivers[announce.transport].receive(announce, self._staging)
        except TransferError as error:
            self._answers.append(w.Failed(transfer=announce.transfer, stage="receive", detail=str(error)))
        else:
            self._answers.append(w.Loaded(transfer=announce.transfer, version=announce.manifest.version))


def main(config_json: str, name: str, transports: str, dies_at: str) -> None:
    """What a process of its own does: it follows the learner until it kills or freezes itself at a moment of version 2.

    Args:
        transports: their names, with commas between them.
        dies_at: `ready`, `loading` or `applying`; with `-frozen` it stops instead of dying.
    """
    member = Member(RunConfig.model_validate_json(config_json), name, transports=tuple(transports.split(",")))
    moment, _, frozen = dies_at.partition("-")

    def die() -> None:
        if 2 in dict(member.announced):
            os.kill(os.getpid(), signal.SIGSTOP if frozen else signal.SIGKILL)

    if moment == "ready":
        member.after_ready = die
    if moment == "loading":
        member.before_loading = die
    if moment == "applying":
        member.before_applying = die
    member.run()
