"""One end of a weight transport in a process of its own, which says how far it is and is then killed."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from torch import Tensor

from slipstream.buffer.wire.weights.protocol import Announce, Form, Manifest
from slipstream.configs import RunConfig
from slipstream.learner.weights.broadcast import GlooTransport
from slipstream.learner.weights.fetch import StreamTransport
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.weights.receivers import build_receivers
from tests.contract.transfers import BUCKET_BYTES, Versions

PATIENCE_S = 120.0


@dataclass
class Doomed:
    """The process, and what it says."""

    process: BaseProcess
    says: "Connection[Any, Any]"

    def said(self) -> Any:
        """The next thing that it says."""
        assert self.says.poll(PATIENCE_S), "it says nothing"
        return self.says.recv()

    def kill(self) -> None:
        """With SIGKILL."""
        self.process.kill()


@contextlib.contextmanager
def doomed(forks: ForkServerContext, role: Callable[..., None], *arguments: object) -> Iterator[Doomed]:
    """Plays a role in a process of its own, which is killed in the end."""
    here, there = forks.Pipe()
    process = forks.Process(target=role, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        yield Doomed(process, here)
    finally:
        process.kill()
        process.join()
        process.close()
        here.close()


class Halting(Staging):
    """Stops in the middle of a transfer."""

    def __init__(self, run: str, says: "Connection[Any, Any]") -> None:
        super().__init__(run, shared=False)
        self._says = says

    def begin(self, manifest: Manifest) -> Tensor:
        """Says so, and goes no further."""
        data = super().begin(manifest)
        _say_and_wait(self._says, "begun")
        return data


def serve(says: "Connection[Any, Any]", config: RunConfig, announce: Announce, form: Form | None = None) -> None:
    """A rollout server that stops before the first byte."""
    receiver = build_receivers(config.security)[announce.transport]
    if form is not None:
        receiver.enter(form)
    receiver.receive(announce, Halting(config.run.name, says))


def broadcast(says: "Connection[Any, Any]", config: RunConfig, run: str) -> None:
    """A learner that stops after the first bucket."""
    snapshot = Versions(run).next()
    gloo = GlooTransport(config.weights)
    gloo.form(1, 2)
    gloo.send(replace(snapshot, data=snapshot.data[:BUCKET_BYTES]))
    _say_and_wait(says, "half sent")


def offer(says: "Connection[Any, Any]", config: RunConfig, run: str) -> None:
    """A learner that stops before anybody fetches."""
    snapshot = Versions(run).next()
    stream = StreamTransport(config.weights, config.security, full_every=1)
    stream.prepare(snapshot)
    _say_and_wait(says, (snapshot.manifest, stream.source(snapshot, -1)))


def _say_and_wait(says: "Connection[Any, Any]", what: object) -> None:
    says.send(what)
    says.recv()
