"""Receiving processes of the weight benches: `weights_worker ADDRESS ROLE ...`; requests come from ADDRESS."""

import asyncio
import contextlib
import gc
import random
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import uvloop
import zmq
import zmq.asyncio
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.messages import Message
from slipstream.buffer.wire.weights.protocol import Announce, Form, Manifest
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import configure_logging
from slipstream.configs.runtime.network import use_loopback_interface
from slipstream.configs.runtime.processes import raise_malloc_thresholds
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.rollout_servers.engines.base import Completion, DirectTransport, Pressure, RequestRefused, TensorSource
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.weights.eval_hold import EvaluationHold
from slipstream.rollout_servers.weights.follower import WeightFollower
from slipstream.rollout_servers.weights.receivers import build_receivers

MODULE = "slipstream.tools.bench.weights_worker"
PROMPT = list(range(2, 18))
MIN_TOKENS, MAX_TOKENS = 32, 96
"""Answers of different lengths, so that they don't all end in the same step."""
TIMEOUT = timedelta(seconds=120)


class Ready(Message, frozen=True):
    """Reply: the process has started, or has done what was requested."""


class Broadcast(Message, frozen=True):
    """Request to `receive`: take part in a bare gloo broadcast."""

    size_bytes: int


class Received(Message, frozen=True):
    """Reply: a version has arrived and its checksums agree."""

    seconds: float


class Follow(Message, frozen=True):
    """Request to `follow`: join this run as a rollout server."""

    config: str
    """As JSON."""


class Leave(Message, frozen=True):
    """Request to `follow`: leave the run."""


class Generate(Message, frozen=True):
    """Request to `generate`: generate for so many seconds."""

    seconds: float


class Generated(Message, frozen=True):
    """Reply: the answers of a `Generate`."""

    tokens: int
    seconds: float


class BareGloo:
    """A broadcast from rank 0 to rank 1 without anything around it: what the transport `gloo` is compared with."""

    def __init__(self, config: WeightsConfig, rank: int, data: Tensor | None) -> None:
        """Connects; rank 0 has the data. Raises: RuntimeError, from torch, when the other side is missing."""
        self._data = data
        self._bucket_bytes = config.bucket_bytes
        store = TCPStore("127.0.0.1", config.store_port, None, rank == 0, TIMEOUT, wait_for_workers=False)
        self._group: Any = ProcessGroupGloo(PrefixStore("bare", store), rank, 2, TIMEOUT)

    def run(self, size_bytes: int) -> None:
        """Broadcasts once, bucket after bucket."""
        if self._data is None:
            self._data = torch.ones(size_bytes, dtype=torch.uint8)
        for start in range(0, size_bytes, self._bucket_bytes):
            self._group.broadcast(self._data[start : start + self._bucket_bytes], 0).wait()


# --- receive: versions arrive in staging memory -----------------------------------------------------------------------


def receive(address: str, config_json: str, bare_config_json: str) -> None:
    """Serves `Form`, `Announce` and `Broadcast` until it is stopped."""
    config = RunConfig.model_validate_json(config_json)
    use_loopback_interface(config.weights.bind)
    receivers = build_receivers(config.security)
    staging = Staging(config.run.name, shared=False)
    bare: BareGloo | None = None
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        reply: Message = Ready()
        while True:
            socket.send(encode(reply))
            reply = Ready()
            match decode(socket.recv(), Form | Announce | Broadcast):
                case Form() as form:
                    receivers[form.transport].enter(form)
                case Announce() as announce:
                    started = time.perf_counter()
                    receivers[announce.transport].receive(announce, staging)
                    reply = Received(seconds=time.perf_counter() - started)
                case Broadcast(size_bytes=size):
                    bare = bare or BareGloo(WeightsConfig.model_validate_json(bare_config_json), 1, None)
                    bare.run(size)


# --- follow: a rollout server whose engine does nothing ---------------------------------------------------------------


class NullEngine:
    """Installs every version at no cost, so that only the weight channel takes time. Refuses to generate."""

    shares_memory = False
    ready = True

    def __init__(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self.version = 0
        self.direct: DirectTransport | None = None

    async def join(self, group: Form) -> None:
        return None

    async def install(self, version: int, manifest: Manifest, tensors: TensorSource) -> float:
        self.version = version
        return 0.0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        samples: int,
        greedy: bool,
        deadline_s: float,
        max_tokens: int | None = None,
    ) -> list[Completion]:
        raise RequestRefused("this engine does not generate")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        raise RequestRefused("this engine does not score")

    async def checksums(self) -> None:
        return None

    async def pressure(self) -> Pressure:
        return Pressure(kv_cache_usage=0.0, preemptions=0)

    async def fail(self, reason: str) -> None:
        return None

    async def close(self) -> None:
        return None


async def follow(address: str, name: str) -> None:
    """Serves `Follow` and `Leave` in turn until it is stopped."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        await socket.send(encode(Ready()))
        while True:
            request = decode(await socket.recv(), Follow)
            member = asyncio.create_task(_run_member(RunConfig.model_validate_json(request.config), name))
            leave = asyncio.ensure_future(socket.recv())
            await asyncio.wait({member, leave}, return_when=asyncio.FIRST_COMPLETED)
            if member.done():
                member.result()
            decode(await leave, Leave)
            member.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await member
            await socket.send(encode(Ready()))


async def _run_member(config: RunConfig, name: str) -> None:
    use_loopback_interface(config.weights.bind)
    context = zmq.asyncio.Context()
    try:
        await WeightFollower(config, name, NullEngine(), EvaluationHold(), on_applied=lambda: None).run(context)
    finally:
        context.term()


# --- generate: a rollout server with a real engine --------------------------------------------------------------------


async def generate(address: str, config_json: str, concurrency: str) -> None:
    """Serves `Generate` until it is stopped, and follows the learner meanwhile."""
    config = RunConfig.model_validate_json(config_json)
    use_loopback_interface(config.weights.bind)
    assert config.model.path is not None, "the bench has written the policy"
    start = partial(start_engine, config, config.model.path, eos_token_ids=())
    engine = RestartingEngine(await start(), start, config.rollout)
    context = zmq.asyncio.Context()
    member = WeightFollower(config, "generator", engine, EvaluationHold(), on_applied=lambda: None)
    try:
        with context.socket(zmq.PAIR) as socket:
            socket.connect(address)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(member.run(context))
                await socket.send(encode(Ready()))
                while True:
                    seconds = decode(await socket.recv(), Generate).seconds
                    started = time.perf_counter()
                    streams = [_answers(engine, seed, started + seconds) for seed in range(int(concurrency))]
                    tokens = sum(await asyncio.gather(*streams))
                    reply = Generated(tokens=tokens, seconds=time.perf_counter() - started)
                    await socket.send(encode(reply))
    finally:
        await engine.close()


async def _answers(engine: RestartingEngine, seed: int, until: float) -> int:
    """Generates one answer after the other, the last one cut off at `until`; returns the number of tokens."""
    lengths, tokens = random.Random(seed), 0
    while (left_s := until - time.perf_counter()) > 0:
        length = lengths.randint(MIN_TOKENS, MAX_TOKENS)
        (answer,) = await engine.generate(PROMPT, samples=1, greedy=False, deadline_s=left_s, max_tokens=length)
        tokens += len(answer.token_ids)
    return tokens


def main() -> None:
    """Entry point."""
    address, role, *arguments = sys.argv[1:]
    configure_logging(role, level="warning", folder=None)
    if role == "receive":
        receive(address, *arguments)
        return
    raise_malloc_thresholds()
    try:
        uvloop.run(follow(address, *arguments) if role == "follow" else generate(address, *arguments))
    finally:
        gc.freeze()  # the interpreter would traverse torch and vLLM once more before it ends


if __name__ == "__main__":
    main()
