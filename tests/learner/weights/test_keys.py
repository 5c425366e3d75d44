"""The weights' control plane with keys: both ends take them from the configuration."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog.testing
import zmq.asyncio

from slipstream.configs import RunConfig
from slipstream.configs.schema.weights import SecurityConfig
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.transports import build_transports
from slipstream.rollout_servers.weights.eval_hold import EvaluationHold
from slipstream.rollout_servers.weights.follower import WeightFollower
from slipstream.tools.keys import make_keys
from tests.conftest import free_port
from tests.rollout_servers.scripted import LastingEngine

PATIENCE_S = 60.0


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    make_keys(tmp_path / "keys")
    return RunConfig.model_validate(
        {
            "run": {"name": "locked", "dir": str(tmp_path)},
            "model": {"build": "digits"},
            "weights": {"control_port": free_port(), "store_port": free_port(), "stream_port": free_port()},
            "security": {"keys": str(tmp_path / "keys")},
        }
    )


@contextlib.asynccontextmanager
async def member(config: RunConfig, name: str) -> AsyncIterator[None]:
    context = zmq.asyncio.Context()
    hold = EvaluationHold(hold_s=60.0)
    running = asyncio.create_task(
        WeightFollower(config, name, LastingEngine(), hold, on_applied=lambda: None).run(context)
    )
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])
        context.destroy(linger=0)


async def test_only_a_rollout_server_with_the_keys_joins(config: RunConfig) -> None:
    stranger = config.model_copy(update={"security": SecurityConfig()})
    with structlog.testing.capture_logs() as said:
        publisher = WeightPublisher(config.weights, config.security, build_transports(config), run=config.run.name)
        try:
            async with asyncio.timeout(PATIENCE_S), member(stranger, "thief"):
                while "handshake refused" not in [record["event"] for record in said]:
                    await asyncio.sleep(0.01)
                async with member(config, "r0"):
                    while "rollout server joined" not in [record["event"] for record in said]:
                        await asyncio.sleep(0.01)
        finally:
            publisher.close()
    joined = [record["server"] for record in said if record["event"] == "rollout server joined"]
    assert joined == ["r0"]
