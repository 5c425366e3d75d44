"""A learner that publishes straight into the engines of rollout servers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import zmq.asyncio

from slipstream.buffer.wire.weights.protocol import Probe
from slipstream.configs import RunConfig
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.fetch import StreamTransport
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import SnapshotTaker
from slipstream.learner.weights.transports import Broadcast, Transports
from slipstream.rollout_servers.engines.base import Request
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.weights.eval_hold import EvaluationHold
from slipstream.rollout_servers.weights.follower import WeightFollower
from tests.conftest import free_port
from tests.contract.policies import policy_of, scores, write_policy

PROBED = [3, 4, 5, 6, 7, 8, 9]
BUCKET_BYTES = 1 << 20
PATIENCE_S = 200.0


@dataclass
class Run:
    """A learner that publishes `policy_of` each version, and rollout servers."""

    config: RunConfig
    publisher: WeightPublisher
    context: zmq.asyncio.Context

    @asynccontextmanager
    async def server(self, name: str) -> AsyncIterator[RestartingEngine]:
        """One more, once the learner knows it."""
        path = self.config.model.path
        assert path is not None
        start = partial(start_engine, self.config, path, eos_token_ids=())
        engine = RestartingEngine(await start(), start, self.config.rollout)
        member = WeightFollower(self.config, name, engine, EvaluationHold(hold_s=60.0), on_applied=lambda: None)
        running = asyncio.create_task(member.run(self.context))
        try:
            await until(lambda: name in {member.name for member in self.publisher._roster})
            yield engine
        finally:
            running.cancel()
            await asyncio.wait([running])
            await engine.close()

    def may_broadcast(self) -> bool:
        """True if all servers have reported an engine that can join a group."""
        broadcast = self.publisher._transports.broadcast
        assert broadcast is not None, "given in `run`"
        return all(broadcast.name in member.join.transports for member in self.publisher._roster)

    async def publish(self, version: int) -> None:
        """Returns once all servers have it, or are evicted."""
        model = policy_of(version, tied=False)
        taker = SnapshotTaker(model, dtype=torch.float32, bucket_bytes=BUCKET_BYTES, device=torch.device("cpu"))
        probe = Probe(token_ids=PROBED, logprobs=scores(model, PROBED))
        snapshot = taker.take(version, evaluate=False, keep=True, probe=probe)
        assert snapshot is not None
        await asyncio.to_thread(self.publisher.reclaim)
        await asyncio.to_thread(self.publisher.publish, snapshot)
        await asyncio.to_thread(self.publisher.wait)


@asynccontextmanager
async def run(
    folder: Path, transport: Callable[[WeightsConfig], Broadcast], engine: dict[str, Any], *, deadline_s: float = 60.0
) -> AsyncIterator[Run]:
    """`engine` is what is special about it."""
    # Untied: on a CPU nobody but our own loading ties a head again.
    write_policy(folder / "model", tied=False)
    ports = {name: free_port() for name in ("control_port", "store_port", "stream_port")}
    config = RunConfig.model_validate(
        {
            "run": {"dir": folder, "name": f"direct-{folder.name}"},
            "model": {"path": folder / "model", "dtype": "float32"},
            "weights": {**ports, "bucket_bytes": BUCKET_BYTES, "deadline_s": deadline_s},
            "rollout": {
                "engine": {"max_model_len": 2048, "max_sequences": 16, "start_deadline_s": PATIENCE_S} | engine,
                "sampling": {"ignore_eos": True},
            },
        }
    )
    stream, broadcast = StreamTransport(config.weights, config.security, full_every=1), transport(config.weights)
    publisher = WeightPublisher(
        config.weights,
        config.security,
        Transports((broadcast.name, "stream"), {"stream": stream}, broadcast),
        run=config.run.name,
    )
    context = zmq.asyncio.Context()
    try:
        yield Run(config, publisher, context)
    finally:
        await asyncio.to_thread(publisher.close)
        context.destroy(linger=0)


class Group(Protocol):
    """The learner's end of a transfer group."""

    buckets: int
    """How many it has sent."""
    hangs_at: int | None
    """The bucket that never leaves."""


async def published_while_it_generates(at: Run, engine: RestartingEngine, made: Sequence[Any], *, tokens: int) -> None:
    """Three versions come through one group, each bucket by bucket while answers of so many tokens are drawn.

    Args:
        made: each `Group` of the learner.
    """
    for version in (1, 2, 3):
        long = asyncio.create_task(
            engine.generate(Request([3, 5, 7], samples=4, deadline_s=PATIENCE_S, max_tokens=tokens))
        )
        await engine.generate(Request([3, 5, 7], deadline_s=PATIENCE_S, max_tokens=1))
        await at.publish(version)
        assert engine.version == version
        (after,) = await engine.generate(Request([3, 5, 7], deadline_s=PATIENCE_S, max_tokens=9))
        assert {span.version for span in after.spans} == {version}
        stamps = {span.version for answer in await long for span in answer.spans}
        assert version - 1 in stamps <= {version - 1, version}
    (group,) = made
    assert group.buckets >= 9, "none was fetched, and each came in several buckets"
    figures = at.publisher.metrics
    assert (len(figures.deviations), figures.evictions, figures.unreached) == (3, 0, 0), "each was probed"


async def broken_off_half_way(at: Run, engine: RestartingEngine, made: Sequence[Any]) -> None:
    """Afterwards, version 4 costs the engine; the next version is fetched, and the one after it broadcast."""
    group: Group = made[0]
    sent, first = group.buckets, engine.incarnation
    group.hangs_at = sent + 1
    await at.publish(4)
    await until(lambda: engine.version == 4)
    assert engine.incarnation != first
    assert (len(made), group.buckets) == (1, sent + 1)
    for version in (5, 6):
        await at.publish(version)
        assert engine.version == version
        await until(at.may_broadcast)
    assert len(made) == 2
    assert at.publisher.metrics.unreached == 0


async def until(condition: Callable[[], bool]) -> None:
    """Returns once it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)
