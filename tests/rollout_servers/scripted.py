"""Engines with scripted answers, for tests of the code around an engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.configs import RunConfig
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.env.base import Env
from slipstream.env.registry import build_env
from slipstream.models.digits import TOKENS
from slipstream.models.tokenizer import Tokenizer
from slipstream.rewards.scorer import Scorer
from slipstream.rollout_servers.engines.base import (
    Completion,
    DirectSource,
    DirectTransport,
    Engine,
    EngineError,
    Pressure,
    Request,
    TensorSource,
)
from slipstream.rollout_servers.engines.staging import HOST
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.rollouts.player import Player


def ids(text: str) -> list[int]:
    """The tokens of the digits model."""
    return [TOKENS.index(token) for token in text]


def completion(token_ids: Sequence[int], *, finish_reason: str = "stop", version: int = 0) -> Completion:
    """An answer of one version with log-probs -1, -2, …"""
    logprobs = [-float(place + 1) for place in range(len(token_ids))]
    spans = [VersionSpan(version=version, start=0, end=len(token_ids))] if token_ids else []
    return Completion(token_ids, logprobs, spans, finish_reason)


@dataclass
class ScriptedEngine:
    """Answers every prompt with `answers`; records what it was asked; fails with `failure`, if there is one.

    Attributes:
        asked: a request as (prompt, samples, greedy); an update as its manifest; other calls by their names.
        max_tokens: how long an answer each request asked for.
        installed: the bytes of each version that it was given.
    """

    answers: list[Completion] = field(default_factory=list)
    failure: EngineError | None = None
    version: int = 0
    logprobs: list[float] = field(default_factory=list)
    usage: Pressure = field(default_factory=lambda: Pressure(kv_cache_usage=0.0, preemptions=0))
    shares_memory: bool = False
    device: torch.device = HOST
    direct: DirectTransport | None = None
    asked: list[object] = field(default_factory=list)
    max_tokens: list[int | None] = field(default_factory=list)
    installed: list[bytes] = field(default_factory=list)

    async def generate(self, request: Request) -> list[Completion]:
        self.max_tokens.append(request.max_tokens)
        self._note((list(request.prompt_ids), request.samples, request.greedy))
        return self.answers

    async def join(self, group: Form) -> None:
        self._note(group)

    async def install(self, version: int, manifest: Manifest, tensors: TensorSource) -> float:
        self._note(manifest)
        if isinstance(tensors, DirectSource):
            await tensors.approval()
        else:
            self.installed.append(tensors.data.numpy().tobytes())
        self.version = version
        return 0.25

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self._note("score")
        return self.logprobs

    async def checksums(self) -> dict[str, int] | None:
        self._note("checksums")
        return None

    async def pressure(self) -> Pressure:
        # Not noted: it is asked over and over.
        if self.failure is not None:
            raise self.failure
        return self.usage

    async def close(self) -> None:
        self._note("close")

    def _note(self, what: object) -> None:
        self.asked.append(what)
        if self.failure is not None:
            raise self.failure


@dataclass
class LastingEngine(ScriptedEngine):
    """One that is asked to start anew notes why, and shows tensors with the checksums `held`, if there are any."""

    incarnation: str = "first"
    ready: bool = True
    given_up: list[str] = field(default_factory=list)
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    held: dict[str, int] | None = None

    async def checksums(self) -> dict[str, int] | None:
        return self.held

    async def fail(self, reason: str) -> None:
        self.given_up.append(reason)
        self.failed.set()


def lasting(engine: Engine, rollout: RolloutConfig) -> RestartingEngine:
    """The engine as a server has it, which counts its tokens; it never starts again."""

    async def start() -> Engine:
        return await asyncio.Future()

    return RestartingEngine(engine, start, rollout)


def build_player(config: RunConfig, model: Path, engine: Engine, *, env: Env | None = None) -> Player:
    """The player of a run, with the tokenizer of `model`."""
    scorer = Scorer(config.rewards, config.scoring, evaluated=config.evaluated, backoff_s=0.01)
    return Player.from_config(config, env or build_env(config.env), Tokenizer(model), engine, scorer)
