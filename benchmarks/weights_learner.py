"""A learner that publishes without training: random policies in the shape of Qwen3, and the real publisher."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.step import qwen3
from benchmarks.workers import Workers, free_port
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import DeadlineError, SlipstreamError
from slipstream.configs.schema.model import LoraConfig
from slipstream.configs.schema.weights import TRANSPORTS
from slipstream.learner.models import attention
from slipstream.learner.models.lora import add_adapters
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import Prober, Snapshot, SnapshotTaker
from slipstream.learner.weights.transports import build_transports

DEADLINE_S = 120.0
CONTEXT = 1024
LAYERS = 14
FACTOR = 1.01
"""Larger than the step between two neighbours in bfloat16, so that every multiplied number changes."""
CHANGED_SHARE = 0.1
PROBE_TOKENS = 32
POLL_S = 0.02


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3."""

    vocabulary: int
    hidden: int
    layers: int


TINY = Shape(vocabulary=32, hidden=64, layers=2)
SMALL = Shape(vocabulary=8192, hidden=512, layers=8)
QWEN3_0_6B = Shape(vocabulary=151_936, hidden=1024, layers=28)


def shape_of(parameters: int) -> Shape:
    """A shape of about so many parameters, at least a quarter of a million."""
    # A layer has 15 hidden², vocabulary and head together have 32 hidden² here.
    hidden = math.isqrt(parameters // (15 * LAYERS + 32))
    hidden = max(32, round(hidden / 32) * 32)
    return Shape(vocabulary=16 * hidden, hidden=hidden, layers=LAYERS)


def build_policy(policy: Shape | Path) -> nn.Module:
    """A random Qwen3, or a saved model, in fp32 as a learner holds it. Raises: OSError from transformers."""
    attention.register()
    options: dict[str, Any] = {"attn_implementation": attention.NAME, "dtype": torch.float32}
    if isinstance(policy, Path):
        model: Any = AutoModelForCausalLM.from_pretrained(policy, local_files_only=True, **options)
    else:
        heads = max(1, policy.hidden // 32)
        config = qwen3(
            vocabulary=policy.vocabulary, hidden=policy.hidden, layers=policy.layers, heads=heads,
            kv_heads=max(1, heads // 2), max_position_embeddings=CONTEXT,
        )  # fmt: skip
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**config), **options)
    built: nn.Module = model.eval()
    return built


@torch.no_grad()
def adapt(policy: Any, lora: LoraConfig) -> None:
    """Adds random adapters, which alone are trained from now on."""
    add_adapters(policy, policy.model, lora, dtype=torch.float32)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.02)


@torch.no_grad()
def perturb(policy: nn.Module, share: float, generator: torch.Generator) -> None:
    """Changes about this share (below 1) of each trained tensor's numbers, at random places.

    Args:
        generator: one of the policy's device.
    """
    for parameter in filter(lambda each: each.requires_grad, policy.parameters()):
        flat = parameter.view(-1)
        drawn = round(-math.log1p(-share) * flat.numel())  # places are drawn with replacement
        places = torch.randint(flat.numel(), (drawn,), generator=generator, device=flat.device)
        flat[places] = flat[places] * FACTOR


def weights_config(folder: Path, name: str, **sections: Any) -> RunConfig:
    """The configuration of a run that only moves weights, on free ports; `sections` override it."""
    weights = {
        "control_port": free_port(),
        "store_port": free_port(),
        "stream_port": free_port(),
        "deadline_s": DEADLINE_S,
        "folder": str(folder / name),
        "verify": False,
    }
    return RunConfig.model_validate(
        {"run": {"name": name, "dir": str(folder)}, "model": {"build": "digits"}}
        | sections
        | {"weights": weights | sections.get("weights", {})}
    )


def whole_run_config(folder: Path, name: str, *, max_staleness: int, **sections: Any) -> RunConfig:
    """The configuration of a run with Redis, buffer and rewards in the rollout server, without evaluations."""
    address = f"tcp://127.0.0.1:{free_port()}"
    return weights_config(
        folder,
        name,
        scoring={"workers": 0},
        eval={"tasks": 0},
        redis={"port": free_port()},
        buffer={"bind": address, "endpoint": address, "max_staleness": max_staleness},
        **sections,
    )


def take(taker: SnapshotTaker, version: int, probe: Any = None) -> Snapshot:
    """A snapshot of the present weights."""
    snapshot = taker.take(version, evaluate=False, keep=True, probe=probe)
    assert snapshot is not None, "keep=True"
    return snapshot


@dataclass(frozen=True)
class Publication:
    """Times of one publication, in seconds."""

    taken_s: float
    """Scoring the probe and copying the weights, while training stands still."""
    applied_s: float
    """From `publish` until every server has applied the version."""
    cpu_s: float
    """CPU time of this process in `applied_s`."""


class Learner:
    """A policy, its publisher, and the cost of publications.

    Attributes:
        version_bytes: size of the last version.
    """

    def __init__(self, workers: Workers, config: RunConfig, policy: nn.Module, *, device: torch.device) -> None:
        self._workers = workers
        self._transport = config.weights.transport
        self._policy = policy
        self._generator = torch.Generator(device).manual_seed(0)
        self.publisher = WeightPublisher(config.weights, config.security, build_transports(config), run=config.run.name)
        self._taker = SnapshotTaker(
            policy,
            dtype=getattr(torch, config.model.dtype_here),
            bucket_bytes=config.weights.bucket_bytes,
            device=device if self.publisher.on_device else torch.device("cpu"),
            segments=config.run.name if self.publisher.in_place else None,
        )
        model: Any = policy
        vocabulary = model.config.vocab_size
        verify = config.weights.verify
        self._prober = Prober(policy, tokens=PROBE_TOKENS, vocabulary=vocabulary, device=device) if verify else None
        self._version = 0
        self.version_bytes = 0

    @property
    def updates(self) -> int:
        """Number of updates that servers have applied."""
        return len(self.publisher.metrics.stalls_s)

    def train(self) -> None:
        """Changes the policy."""
        perturb(self._policy, CHANGED_SHARE, self._generator)

    def publish(self) -> Publication:
        """Publishes the next version and waits until all servers have applied it.

        Raises: SlipstreamError when a server was evicted.
        """
        figures = self.publisher.metrics
        evictions = figures.evictions
        started = time.perf_counter()
        self._version += 1
        self.publisher.reclaim()
        snapshot = take(self._taker, self._version, None if self._prober is None else self._prober.score())
        self.version_bytes = snapshot.data.numel()
        taken_s, cpu_before = time.perf_counter() - started, time.process_time()
        self.publisher.publish(snapshot)
        self.publisher.wait()
        cpu_s = time.process_time() - cpu_before
        if figures.evictions > evictions:
            raise SlipstreamError(f"a server did not apply version {self._version} and was evicted")
        return Publication(taken_s, figures.published_s[-1], cpu_s)

    def require_transport(self) -> None:
        """Turns off the fallback of broadcasts: from now on a server that one does not reach is evicted.

        A server whose broadcast fails would fetch the version, so another transport would be measured.

        Raises: SlipstreamError when a broadcast has failed already.
        """
        if not any(transport.broadcast for transport in TRANSPORTS.values() if transport.key == self._transport):
            return
        if self.publisher.metrics.unreached:
            raise SlipstreamError(f"versions don't arrive through {self._transport}; see the log for the reason")
        for transport in TRANSPORTS.values():
            if not transport.broadcast:
                self.publisher.withdraw(transport.name)

    def await_updates(self, count: int, deadline_s: float) -> None:
        """Waits until servers have applied so many updates in all. Raises: DeadlineError."""
        deadline = time.monotonic() + deadline_s
        while self.updates < count:
            self._workers.pause(POLL_S)
            if time.monotonic() > deadline:
                raise DeadlineError(f"{count} updates were not applied within {deadline_s:g} s")

    def close(self) -> None:
        """Frees ports and memory."""
        self.publisher.close()
        self._taker.close()
