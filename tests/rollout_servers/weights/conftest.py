"""A weight member that runs, for every test."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq.asyncio

from slipstream.buffer.wire.sockets import bind_router
from slipstream.buffer.wire.weights.layout import Segment
from slipstream.rollout_servers.weights.eval_hold import EvaluationHold
from slipstream.rollout_servers.weights.follower import WeightFollower
from tests.rollout_servers.scripted import LastingEngine
from tests.rollout_servers.weights.channel import DEADLINE_S, Channel, following


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[Channel]:
    config = following(tmp_path)
    context = zmq.asyncio.Context()
    learner = bind_router(context, f"tcp://127.0.0.1:{config.weights.control_port}", max_message_bytes=1 << 20)
    engine, applied = LastingEngine(), asyncio.Event()
    member = WeightFollower(config, "server-1", engine, EvaluationHold(hold_s=60.0), on_applied=applied.set)
    running = asyncio.create_task(member.run(context))
    segment = Segment(config.run.name, 16)
    channel = Channel(member, engine, learner, running, applied, segment)
    await channel.join()  # now the learner can reach it
    yield channel
    running.cancel()
    await asyncio.wait([running])
    context.destroy(linger=0)
    segment.close()


@pytest.fixture
async def hold() -> EvaluationHold:
    return EvaluationHold(hold_s=DEADLINE_S)
