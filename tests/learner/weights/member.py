"""A rollout server's side of the weight channel, without an engine: it keeps the bytes of every version.

As a process of its own: python -m tests.learner.weights.member CONFIG_JSON NAME DIES_AT
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import zmq
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from slipstream.buffer.wire import weights as w
from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.messages import Message
from slipstream.configs import RunConfig

JOIN_S = 0.2


class Member:
    """Speaks the control protocol and receives through gloo, until it is closed.

    Attributes:
        received: the bytes of each version that was applied.
        announced: versions in the order in which they were announced.
        before_entering, after_ready, before_applying: called at these moments of every transfer.
        answers_announce: whether it says that it is ready.
    """

    def __init__(self, config: RunConfig, name: str, *, answers_announce: bool = True) -> None:
        self.received: dict[int, Tensor] = {}
        self.announced: list[int] = []
        self.changed = threading.Condition()
        self.before_entering: Callable[[], None] = nothing
        self.after_ready: Callable[[], None] = nothing
        self.before_applying: Callable[[], None] = nothing
        self.answers_announce = answers_announce
        self._config = config
        self._name = name
        self._version, self._epoch = 0, -1
        self._closing = threading.Event()
        self._background = ThreadPoolExecutor(1)
        self._group: Future[Any]
        self._receiving: Future[Tensor]
        self._thread = threading.Thread(target=self.run)

    def start(self) -> "Member":
        """Follows the learner in a thread."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Leaves."""
        self._closing.set()
        self._thread.join()
        self._background.shutdown(wait=True)

    def wait_for(self, version: int, deadline_s: float = 60.0) -> Tensor:
        """The bytes of `version`, once it is applied."""
        with self.changed:
            assert self.changed.wait_for(lambda: version in self.received, deadline_s), (
                f"{self._name} has {sorted(self.received)} after {deadline_s} s, not {version}"
            )
        return self.received[version]

    def wait_until_announced(self, version: int, deadline_s: float = 60.0) -> None:
        """Returns once `version` is announced."""
        with self.changed:
            assert self.changed.wait_for(lambda: version in self.announced, deadline_s), f"{version} not announced"

    def run(self) -> None:
        """Follows the learner."""
        weights = self._config.weights
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IDENTITY, self._name.encode())
            socket.connect(f"tcp://{weights.host}:{weights.control_port}")
            while not self._closing.is_set():
                socket.send(encode(self._join()))
                while not self._closing.is_set() and socket.poll(round(JOIN_S * 1000)):
                    reply = self._obey(decode(socket.recv(), w.FromLearner))
                    if reply is not None:
                        socket.send(encode(reply))
                        if isinstance(reply, w.Ready):
                            self.after_ready()

    def _join(self) -> w.Join:
        return w.Join(run=self._config.run.name, server=self._name, epoch=self._epoch, version=self._version, workers=1)

    def _obey(self, message: Any) -> Message | None:
        match message:
            case w.Form():
                self._group = self._background.submit(self._enter, message)
                self._epoch = message.epoch
            case w.Announce(manifest=manifest):
                with self.changed:
                    self.announced.append(manifest.version)
                    self.changed.notify_all()
                if not self.answers_announce:
                    return None
                self._receiving = self._background.submit(self._receive, self._group, manifest)
                return w.Ready(version=manifest.version)
            case w.Sent(version=version):
                self.before_applying()
                try:
                    data = self._receiving.result()
                except RuntimeError as error:
                    return w.Failed(stage="sent", detail=str(error))
                with self.changed:
                    self.received[version], self._version = data, version
                    self.changed.notify_all()
                return w.Applied(version=version, stall_s=0.125)
        return None

    def _enter(self, form: w.Form) -> Any:
        self.before_entering()
        timeout = timedelta(seconds=form.deadline_s)
        store = TCPStore(form.host, form.port, None, False, timeout, wait_for_workers=False)
        return ProcessGroupGloo(PrefixStore(f"epoch{form.epoch}", store), form.rank, form.world, timeout)

    def _receive(self, group: "Future[Any]", manifest: w.Manifest) -> Tensor:
        _, total = w.layout(manifest.tensors)
        data = torch.zeros(total, dtype=torch.uint8)
        for start in range(0, total, manifest.bucket_bytes):
            group.result().broadcast(data[start : start + manifest.bucket_bytes], 0).wait()
        return data


def nothing() -> None:
    """The default of the moments."""


def main(config_json: str, name: str, dies_at: str) -> None:
    """Follows the learner until it kills itself: once it is `ready` for version 2, or when that is `sent` and to be
    applied."""
    member = Member(RunConfig.model_validate_json(config_json), name)

    def die() -> None:
        if 2 in member.announced:
            os.kill(os.getpid(), signal.SIGKILL)

    if dies_at == "ready":
        member.after_ready = die
    if dies_at == "sent":
        member.before_applying = die
    member.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
