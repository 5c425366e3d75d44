"""Engines that crash on command, one after the other."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.buffer.wire.weights.protocol import Manifest, TensorInfo
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.rollout_servers.engines.base import Completion, EngineError, Request
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from tests.rollout_servers.scripted import ScriptedEngine, completion

DEADLINE_S = 30.0
NEVER_S = 1000.0
MOST_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Pending(Request):
    """A request without its answers yet."""

    answers: "asyncio.Future[list[Completion]]"

    def answer(self, *token_ids: int, **options: Any) -> None:
        """Gives each sample this answer."""
        self.answers.set_result([completion([*token_ids], **options)] * self.samples)


@dataclass
class MortalEngine(ScriptedEngine):
    """Answers a request when its future is set."""

    requests: list[Pending] = field(default_factory=list)

    async def generate(self, request: Request) -> list[Completion]:
        answers: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self.requests.append(Pending(**vars(request), answers=answers))
        return await answers

    async def received(self, number: int = 1) -> list[Pending]:
        """Its requests, once there are so many."""
        await until(lambda: len(self.requests) == number)
        return self.requests

    def crash(self, *unfinished: Completion, reason: str = "out of memory") -> None:
        for request in self.requests:
            if not request.answers.done():
                request.answers.set_exception(EngineError(reason, list(unfinished) or None))


@dataclass
class Engines:
    """The engines of one server, one after the other."""

    started: list[MortalEngine] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    may_start: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_start.set()

    async def start(self) -> MortalEngine:
        await self.may_start.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.started.append(MortalEngine())
        return self.started[-1]

    async def restarting(self, *, version: int = 0, give_up_after: int = 3) -> RestartingEngine:
        """An engine over these, the first of which has `version`."""
        first = await self.start()
        first.version = version
        settings = {"sampling": {"max_tokens": MOST_TOKENS}, "engine": {"give_up_after": give_up_after}}
        return RestartingEngine(first, self.start, RolloutConfig.model_validate(settings))

    async def busy(self, number: int, requests: int = 1) -> MortalEngine:
        """The engine of that number, once it has so many requests."""
        await until(lambda: len(self.started) > number and len(self.started[number].requests) >= requests)
        return self.started[number]


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not met():
            await asyncio.sleep(0.001)


def ask(engine: RestartingEngine, **changes: Any) -> "asyncio.Task[list[Completion]]":
    return asyncio.create_task(engine.generate(Request([3, 5], **({"deadline_s": NEVER_S} | changes))))


def span(version: int, start: int, end: int) -> VersionSpan:
    return VersionSpan(version=version, start=start, end=end)


def manifest(version: int) -> Manifest:
    """A version of four numbers."""
    tensors = [TensorInfo(name="w", dtype="float32", shape=[4])]
    return Manifest(version=version, tensors=tensors, bucket_bytes=16, evaluate=False)


async def install(engine: RestartingEngine, version: int) -> float:
    staging = Staging("run", shared=False)
    staging.begin(manifest(version)).copy_(torch.zeros(16, dtype=torch.uint8))
    return await engine.install(version, manifest(version), staging)
