"""A learner that does not learn: a policy that changes a little, published by the real publisher."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import DeadlineError, SlipstreamError
from slipstream.learner.weights.members import BROADCAST
from slipstream.learner.weights.probe import Prober
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import SnapshotTaker
from slipstream.learner.weights.transports.registry import build_transports
from slipstream.tools.bench.weights.crew import Crew
from slipstream.tools.bench.weights.policy import change

PROBE_TOKENS = 32
CHECK_S = 0.02


@dataclass(frozen=True)
class Published:
    """What one publication took; all in seconds."""

    taken_s: float
    """Scoring the probe and copying the weights: training stands still."""
    blocked_s: float
    """What `publish` took."""
    applied_s: float
    """From there until every server had applied the version."""
    cpu_s: float
    """CPU time of this process in `applied_s`."""


class Learner:
    """Publishes, and knows what it cost."""

    def __init__(
        self, crew: Crew, config: RunConfig, model: nn.Module, *, device: torch.device, changes: float = 0.1
    ) -> None:
        """`changes` is the share of the numbers that change from version to version."""
        self._crew = crew
        self._config = config
        self._model = model
        self._changes = changes
        self._generator = torch.Generator(device).manual_seed(0)
        self.publisher = WeightPublisher(config, build_transports(config))
        self._taker = SnapshotTaker(
            model,
            dtype=getattr(torch, config.model.dtype),
            bucket_bytes=config.weights.bucket_bytes,
            device=device if self.publisher.on_device else torch.device("cpu"),
            segments=config.run.name if self.publisher.offers("shm") else None,
        )
        policy: Any = model
        self._prober = (
            Prober(model, tokens=PROBE_TOKENS, vocabulary=policy.config.vocab_size, device=device)
            if config.weights.verify
            else None
        )
        self._version = 0

    def train(self) -> None:
        """Changes the policy."""
        change(self._model, self._changes, self._generator)

    def publish(self) -> Published:
        """Publishes the policy as the next version and waits until all servers have it.

        Raises: SlipstreamError when a server was evicted.
        """
        figures = self.publisher.figures
        evicted = figures.evictions
        began = time.perf_counter()
        self._version += 1
        probe = None if self._prober is None else self._prober.score()
        snapshot = self._taker.take(self._version, evaluate=False, keep=True, probe=probe)
        assert snapshot is not None, "kept"
        started, cpu_started = time.perf_counter(), time.process_time()
        self.publisher.publish(snapshot)
        blocked = time.perf_counter()
        self.publisher.wait()
        cpu_s = time.process_time() - cpu_started
        if figures.evictions > evicted:
            raise SlipstreamError(f"a server did not apply version {self._version} and was evicted")
        return Published(
            taken_s=started - began, blocked_s=blocked - started, applied_s=figures.published_s[-1], cpu_s=cpu_s
        )

    def insist(self) -> None:
        """From now on a version comes through the transport that was chosen, or not at all: then its server is evicted.

        Otherwise a server that a broadcast breaks off at fetches the version, and what is measured is something else.

        Raises: SlipstreamError when broadcasts have not reached a server so far.
        """
        transport = self._config.weights.transport
        if transport not in BROADCAST:
            return
        if self.publisher.figures.unreached:
            raise SlipstreamError(f"versions don't come through {transport}: the log says why")
        self.publisher.withdraw("stream")

    def await_updates(self, count: int, deadline_s: float) -> None:
        """Waits until so many updates in all have been applied by servers. Raises: DeadlineError."""
        give_up = time.monotonic() + deadline_s
        while len(self.publisher.figures.stalls_s) < count:
            self._crew.pause(CHECK_S)
            if time.monotonic() > give_up:
                raise DeadlineError(f"{count} updates were not applied within {deadline_s:g} s")

    @property
    def updates(self) -> int:
        """How many updates servers have applied so far."""
        return len(self.publisher.figures.stalls_s)

    def close(self) -> None:
        """Frees ports and memory."""
        self.publisher.close()
        self._taker.close()
