"""The digits model's folder, and running rollout servers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.configs import RunConfig
from slipstream.models.digits import build_digits_model
from slipstream.rollout_servers import server
from slipstream.rollout_servers.engines import supervisor
from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.server import RolloutServer
from tests.conftest import free_port
from tests.rollout_servers.fake_buffer import DEADLINE_S, DONE, NEVER_S, GatedEngine, RunningServer, StartServer
from tests.rollout_servers.scripted import build_player

# More threads only get in each other's way in models of this size, as in the processes of a run.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the digits tokenizer; not to be written to."""
    folder = tmp_path_factory.mktemp("digits") / "model"
    build_digits_model(folder, seed=0)
    return folder


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.001)
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.002)


@pytest.fixture
def digits_settings(model: Path, free_address: str, tmp_path: Path) -> dict[str, Any]:
    """Of a run without a learner and without worker processes."""
    return {
        "run": {"name": "digits", "dir": tmp_path},
        "model": {"path": model},
        "env": {"name": "digits", "options": {"operation": "reverse", "length": 3}},
        "rewards": [{"name": "digit_match"}],
        "scoring": {"workers": 0},
        "buffer": {"bind": free_address, "endpoint": free_address},
        "weights": {"control_port": free_port()},
    }


@pytest.fixture
async def start_server(digits_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StartServer]:
    """Starts servers; they are stopped at the end."""
    started: list[RunningServer] = []
    monkeypatch.setattr(server, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(server, "RESEND_S", NEVER_S)
    monkeypatch.setattr(server, "PRESSURE_INTERVAL_S", 0.05)

    def start(*answers: Completion, **rollout: Any) -> RunningServer:
        config = RunConfig.model_validate(
            digits_settings | {"rollout": {"group_size": 4, "groups_in_flight": 8} | rollout}
        )
        engine, may_restart = GatedEngine(answers=list(answers) or [DONE] * 4), asyncio.Event()
        engine.gate.set()

        async def restart() -> GatedEngine:
            await may_restart.wait()
            successor = GatedEngine(answers=engine.answers)
            successor.gate.set()
            return successor

        lasting = RestartingEngine(engine, restart, config.rollout)
        player = build_player(config, config.model.path or Path(), lasting)
        serving = RolloutServer(config, "server-1", player, lasting)
        started.append(RunningServer(config, serving, asyncio.create_task(serving.run()), engine, may_restart))
        return started[-1]

    yield start
    for running in started:
        ended = running.task.done() and not running.server.is_leaving
        assert not ended or running.task.cancelled(), "the server must not end by itself"
        running.task.cancel()
        await asyncio.wait([running.task], timeout=DEADLINE_S)
