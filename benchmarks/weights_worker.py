"""Receiving processes of the weight benches: `weights_worker ADDRESS ROLE [ARGUMENT...]` serves a role's methods."""

import asyncio
import gc
import random
import sys
import time
import uuid
from asyncio import TaskGroup
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import uvloop
import zmq.asyncio
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from benchmarks.workers import serve
from slipstream.buffer.wire.codec import decode
from slipstream.buffer.wire.weights.protocol import Announce, Form, Manifest
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import configure_logging
from slipstream.configs.runtime.network import use_loopback_interface
from slipstream.configs.runtime.processes import raise_malloc_thresholds
from slipstream.rollout_servers.engines.base import (
    Completion,
    DirectTransport,
    Pressure,
    Request,
    RequestRefused,
    TensorSource,
)
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.weights.eval_hold import EvaluationHold
from slipstream.rollout_servers.weights.follower import Restartable, WeightFollower
from slipstream.rollout_servers.weights.receivers import build_receivers

MODULE = "benchmarks.weights_worker"
PROMPT = list(range(2, 18))
MIN_TOKENS, MAX_TOKENS = 32, 96
"""Answers of different lengths, so that they don't all end in the same step."""
TIMEOUT = timedelta(seconds=120)


class BareGloo:
    """A broadcast from rank 0 to rank 1 without anything around it: the baseline of the transport `gloo`."""

    def __init__(self, port: int, rank: int, data: Tensor, *, bucket_bytes: int) -> None:
        """Connects. Raises: RuntimeError, from torch, when the other side is missing."""
        self._data = data
        self._bucket_bytes = bucket_bytes
        store = TCPStore("127.0.0.1", port, None, rank == 0, TIMEOUT, wait_for_workers=False)
        self._group: Any = ProcessGroupGloo(PrefixStore("bare", store), rank, 2, TIMEOUT)

    def run(self) -> None:
        """Broadcasts once, bucket after bucket."""
        for start in range(0, self._data.numel(), self._bucket_bytes):
            self._group.broadcast(self._data[start : start + self._bucket_bytes], 0).wait()


class Receiver:
    """Receives versions into staging memory."""

    def __init__(self, _: TaskGroup, config_json: str, bare_port: str) -> None:
        config = RunConfig.model_validate_json(config_json)
        use_loopback_interface(config.weights.bind)
        self._receivers = build_receivers(config.security)
        self._staging = Staging(config.run.name, shared=False)
        self._bucket_bytes = config.weights.bucket_bytes
        self._bare_port = int(bare_port)
        self._bare: BareGloo | None = None

    def enter(self, form: bytes) -> None:
        """Enters a process group."""
        group = decode(form, Form)
        self._receivers[group.transport].enter(group)

    def receive(self, announce: bytes) -> None:
        """Receives a version and verifies its checksums."""
        announced = decode(announce, Announce)
        self._receivers[announced.transport].receive(announced, self._staging)

    def broadcast(self, size_bytes: int) -> None:
        """Takes part in a bare gloo broadcast."""
        if self._bare is None:
            data = torch.ones(size_bytes, dtype=torch.uint8)
            self._bare = BareGloo(self._bare_port, 1, data, bucket_bytes=self._bucket_bytes)
        self._bare.run()


class NullEngine:
    """Installs every version at no cost, so that only the weight channel takes time. Refuses to generate."""

    shares_memory = False
    ready = True

    def __init__(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self.version = 0
        self.direct: DirectTransport | None = None
        self.device = torch.device("cpu")

    async def join(self, group: Form) -> None:
        return None

    async def install(self, version: int, manifest: Manifest, tensors: TensorSource) -> float:
        self.version = version
        return 0.0

    async def generate(self, request: Request) -> list[Completion]:
        raise RequestRefused("this engine does not generate")

    async def score(self, *_: Any) -> list[float]:
        raise RequestRefused("this engine does not score")

    async def checksums(self) -> None:
        return None

    async def pressure(self) -> Pressure:
        return Pressure(kv_cache_usage=0.0, preemptions=0)

    async def fail(self, reason: str) -> None:
        return None

    async def close(self) -> None:
        return None


class Server:
    """A rollout server with the real weight channel, and an engine that does nothing."""

    def __init__(self, tasks: TaskGroup, name: str) -> None:
        self._tasks = tasks
        self._name = name
        self._member: asyncio.Task[None] | None = None

    def follow(self, config_json: str) -> None:
        """Joins a run."""
        self._member = self._tasks.create_task(_follow(config_json, self._name, NullEngine()))

    async def leave(self) -> None:
        """Leaves the run."""
        assert self._member is not None, "it has joined a run"
        self._member.cancel()
        with suppress(asyncio.CancelledError):
            await self._member
        self._member = None
        gc.collect()  # its memory is in reference cycles


class Generator:
    """A rollout server with a real engine."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks

    async def start(self, config_json: str) -> None:
        """Starts the engine, and joins the run."""
        config = RunConfig.model_validate_json(config_json)
        assert config.model.path is not None, "the bench has written the policy"
        start = partial(start_engine, config, config.model.path, eos_token_ids=())
        self._engine = RestartingEngine(await start(), start, config.rollout)
        self._tasks.create_task(_follow(config_json, "generator", self._engine))

    async def generate(self, seconds: float, concurrency: int) -> float:
        """Generates for so long; returns the tokens per second."""
        started = time.perf_counter()
        streams = [self._stream(seed, started + seconds) for seed in range(concurrency)]
        return sum(await asyncio.gather(*streams)) / (time.perf_counter() - started)

    async def _stream(self, seed: int, until: float) -> int:
        """Generates one answer after the other, the last one cut off at `until`; returns the number of tokens."""
        lengths, tokens = random.Random(seed), 0
        while (left_s := until - time.perf_counter()) > 0:
            length = lengths.randint(MIN_TOKENS, MAX_TOKENS)
            (answer,) = await self._engine.generate(Request(PROMPT, left_s, max_tokens=length))
            tokens += len(answer.token_ids)
        return tokens


async def _follow(config_json: str, name: str, engine: Restartable) -> None:
    config = RunConfig.model_validate_json(config_json)
    use_loopback_interface(config.weights.bind)
    hold = EvaluationHold(hold_s=config.eval_hold_s)
    with zmq.asyncio.Context() as context:
        await WeightFollower(config, name, engine, hold, on_applied=lambda: None).run(context)


ROLES: dict[str, Any] = {"receive": Receiver, "follow": Server, "generate": Generator}


async def _serve(address: str, role: str, *arguments: str) -> None:
    async with TaskGroup() as tasks:
        await serve(address, ROLES[role](tasks, *arguments))


def main() -> None:
    """Entry point."""
    configure_logging(sys.argv[2], level="warning", folder=None)
    raise_malloc_thresholds()
    uvloop.run(_serve(*sys.argv[1:]))


if __name__ == "__main__":
    main()
