"""The digits model's folder, and rollout servers that run."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.configs import RunConfig
from slipstream.configs.digits_model import build_digits_model
from slipstream.env.registry import build_env
from slipstream.rewards.runners.pool import Scorer
from slipstream.rollout_servers import server
from slipstream.rollout_servers.engines import supervisor
from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.rollouts.single_turn import Player
from slipstream.rollout_servers.server import RolloutServer
from slipstream.rollout_servers.tokenizer import Text
from tests.conftest import free_port
from tests.rollout_servers.line import DEADLINE_S, DONE, NEVER_S, Line, MakeLine, PatientEngine

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
async def make_line(
    model: Path, free_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MakeLine]:
    """Starts servers, which are stopped at the end."""
    lines: list[Line] = []
    monkeypatch.setattr(server, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(server, "RESEND_S", NEVER_S)
    monkeypatch.setattr(server, "PRESSURE_INTERVAL_S", 0.05)

    def make(*answers: Completion, **rollout: Any) -> Line:
        config = RunConfig.model_validate(
            {
                "run": {"name": "line", "dir": tmp_path},
                "model": {"path": model},
                "env": {"name": "digits", "options": {"operation": "reverse", "length": 3}},
                "rewards": [{"name": "digit_match"}],
                "scoring": {"workers": 0},
                "buffer": {"bind": free_address, "endpoint": free_address},
                "rollout": {
                    "group_size": 4,
                    "groups_in_flight": 8,
                }
                | rollout,
                "weights": {"control_port": free_port()},
            }
        )
        engine = PatientEngine(answers=list(answers) or [DONE] * 4)
        engine.may_answer.set()

        may_restart = asyncio.Event()

        async def start() -> PatientEngine:
            await may_restart.wait()
            successor = PatientEngine(answers=engine.answers)
            successor.may_answer.set()
            return successor

        lasting = RestartingEngine(engine, start, config.rollout)
        player = Player(config, build_env(config.env), Text(model), lasting, Scorer.from_config(config))
        serving = RolloutServer(config, "server-1", player, lasting)
        lines.append(Line(config, serving, asyncio.create_task(serving.run()), engine, may_restart))
        return lines[-1]

    yield make
    for line in lines:
        assert not line.running.done() or line.running.cancelled(), "the server must not end by itself"
        line.running.cancel()
        await asyncio.wait([line.running], timeout=DEADLINE_S)
