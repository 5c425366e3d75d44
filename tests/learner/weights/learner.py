"""A learner's side of the weight channel for tests, and what they wait for."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from slipstream.configs import RunConfig
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import SnapshotTaker
from tests.learner.weights.member import Member

PATIENCE_S = 60.0
every_transport = pytest.mark.parametrize("transport", ["gloo", "ipc", "shm", "file", "stream"])
"""Within which everything happens, however busy the machine is."""

Join = Callable[..., Member]


class Learner:
    """A model whose weights are other ones in every version, and the publisher."""

    def __init__(self, config: RunConfig, publisher: WeightPublisher) -> None:
        self.publisher = publisher
        self.sent: dict[int, dict[str, Tensor]] = {}
        torch.manual_seed(0)
        self._model = nn.Linear(300, 70)
        self._snapshots = SnapshotTaker(
            self._model, dtype=torch.float32, bucket_bytes=config.weights.bucket_bytes, device=torch.device("cpu"),
            segments=config.run.name if config.weights.transport in {"auto", "ipc", "shm"} else None,
        )  # fmt: skip

    def publish(self, version: int) -> None:
        """Trains a little, takes a snapshot and hands it over."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(torch.randn_like(parameter))
        self.publisher.reclaim()
        snapshot = self._snapshots.take(version, evaluate=False, keep=True)
        assert snapshot is not None
        self.sent[version] = {name: tensor.clone() for name, tensor in snapshot.named_tensors()}
        self.publisher.publish(snapshot)

    def deliver(self, version: int, *members: Member) -> None:
        """Publishes a version; these members get it bit for bit."""
        self.publish(version)
        for member in members:
            assert same(member.wait_for(version), self.sent[version])

    def wait(self) -> float:
        """Waits for the publication under way, but not for ever; how long it took in seconds."""
        waiting = threading.Thread(target=self.publisher.wait, daemon=True)
        started = time.monotonic()
        waiting.start()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive(), f"the publication hangs for {PATIENCE_S} s"
        return time.monotonic() - started

    def members(self) -> set[str]:
        """Who is fed at the moment."""
        return {member.name for member in self.publisher._roster}

    def close(self) -> None:
        """Ends everything."""
        self.publisher.close()
        self._snapshots.close()


class Gate:
    """A moment of a transfer at which a member waits until it is let through."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)


def same(received: dict[str, Tensor], sent: dict[str, Tensor]) -> bool:
    """Whether every tensor arrived bit for bit."""
    return received.keys() == sent.keys() and all(torch.equal(received[name], sent[name]) for name in sent)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < until, "the condition did not come true"
        pause.wait(0.02)


def gathered(learner: Learner, *names: str) -> None:
    """Returns once exactly these are members."""
    wait_until(lambda: learner.members() == set(names))
