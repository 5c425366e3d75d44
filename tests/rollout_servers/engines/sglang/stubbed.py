"""The engine over a stub of SGLang's server."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.base import EngineSettings
from slipstream.rollout_servers.engines.sglang.arguments import INFO
from slipstream.rollout_servers.engines.sglang.engine import SglangEngine
from tests.rollout_servers.engines.sglang import stub_server

LONG_S = 60.0


@asynccontextmanager
async def engine_over_stub(
    model: Path, folder: Path, *, lora: dict[str, int] | None = None
) -> AsyncIterator[SglangEngine]:
    """An engine whose interpreter runs the stub."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {stub_server.__file__} "$@"\n')
    python.chmod(0o755)
    config = RunConfig.model_validate(
        {
            "run": {"dir": folder},
            "model": {"path": model, "dtype": "float32", "lora": lora},
            "rollout": {
                "engine": {"name": "sglang", "python": python, "start_deadline_s": LONG_S},
                "sampling": {"max_tokens": 40, "ignore_eos": True},
            },
        }
    )
    engine = await SglangEngine.start(EngineSettings(config, model, eos_token_ids=()))
    try:
        yield engine
    finally:
        await engine.close()


async def posted(engine: SglangEngine) -> list[str]:
    """Paths that were posted to the stub."""
    paths: list[str] = json.loads(await engine.server.client.get(INFO, deadline_s=LONG_S))["heard"]
    return paths


async def generated(engine: SglangEngine) -> list[tuple[int, str | None]]:
    """Length of the prompt and name of the adapter of each answer that the stub was asked for."""
    asked = json.loads(await engine.server.client.get(INFO, deadline_s=LONG_S))["generated"]
    return [(tokens, adapter) for tokens, adapter in asked]


async def until(condition: Callable[[list[str]], bool], engine: SglangEngine) -> None:
    """Waits for a condition of the posted paths."""
    async with asyncio.timeout(LONG_S):
        while not condition(await posted(engine)):
            await asyncio.sleep(0.01)
