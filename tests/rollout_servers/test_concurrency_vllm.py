"""The concurrency limiter with a real vLLM."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.rollout_servers.concurrency import Cause, ConcurrencyLimiter, Move
from slipstream.rollout_servers.engines.base import Engine, Pressure, Request
from slipstream.rollout_servers.engines.registry import start_engine

SIZE, GROUPS = 4, 120
ROOM = range(3, 15)
"""Groups between which the limit ends. A KV cache of 60 blocks holds 20 answers of 3 blocks, 5 groups; three times as
many while most of them are young. A preemption per answer and a small queue are let pass."""
DEADLINE_S = 300.0
READING_S = 0.02


@pytest.mark.soak  # the limiter alone is tested in test_concurrency
# vLLM and what it imports warn of their own futures.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
async def test_limit_follows_vllm_from_both_sides(model: Path) -> None:
    tiny = {"max_model_len": 256, "max_sequences": 64, "kv_cache_bytes": 1 << 20, "options": {"block_size": 32}}
    rollout = {
        "group_size": SIZE,
        "sampling": {"max_tokens": 70, "ignore_eos": True},
        "engine": {"core": "inline", **tiny},
    }
    config = RunConfig.model_validate({"model": {"path": model, "dtype": "float32"}, "rollout": rollout})
    engine = await start_engine(config, model, eos_token_ids=())
    try:
        for start, cause in ((1, Cause.ROOM), (32, Cause.QUEUE)):
            limiter = ConcurrencyLimiter(start, 64, group_size=SIZE, max_sequences=64)
            moves, fullest = await run(engine, limiter)
            assert moves[0].cause is cause
            assert limiter.limit in ROOM
            assert fullest.kv_cache_usage > 0.8
            assert fullest.running > 0
    finally:
        await engine.close()


async def run(engine: Engine, limiter: ConcurrencyLimiter) -> tuple[list[Move], Pressure]:
    """Generates all groups, with frequent readings; the moves, and the fullest reading."""
    begun = finished = 0
    moves, fullest, running = list[Move](), Pressure(0.0, 0), set[asyncio.Task[Any]]()
    while begun < GROUPS:
        while begun < GROUPS and len(running) < limiter.limit:
            begun += 1
            asking = engine.generate(Request([3, 5, 7], samples=SIZE, deadline_s=DEADLINE_S))
            running.add(asyncio.create_task(asking))
        done, running = await asyncio.wait(running, timeout=READING_S, return_when=asyncio.FIRST_COMPLETED)
        finished += len(done)
        pressure = await engine.pressure()
        fullest = max(fullest, pressure, key=lambda each: each.kv_cache_usage)
        move = limiter.observe(pressure, groups=len(running) + len(done), finished=finished)
        moves += [move] if move else []
    await asyncio.gather(*running)
    return moves, fullest
