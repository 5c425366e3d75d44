"""The console script `rollout`."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines import registry as build
from slipstream.rollout_servers.engines.base import EngineError
from slipstream.rollout_servers.process import engine_seeds, serve, server_name
from tests.conftest import free_port
from tests.rollout_servers.scripted import ScriptedEngine

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("env.name=digitz", "there is no env 'digitz' (did you mean 'digits'?)"),
        ("rewards=[{name: exact_macht}]", "there is no reward 'exact_macht' (did you mean 'exact_match'?)"),
        ("model={path: /nowhere}", "model.path=/nowhere holds no config.json"),
        ("security.keys=/nowhere", "security.keys: there is no /nowhere/client.key_secret"),
    ],
    ids=["env", "reward", "model", "keys"],
)
def test_what_is_named_and_not_there_is_reported_before_the_engine_starts(
    override: str, complaint: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "slipstream.rollout_servers.cli", str(DEMO), f"run.dir={tmp_path}", override]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert result.returncode == 1
    assert complaint in result.stderr
    assert "engine starts" not in result.stderr
    assert "Traceback" not in result.stderr
    (log,) = (tmp_path / "demo" / "logs").iterdir()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert complaint in lines[-1]["error"]
    assert {line["server"] for line in lines} == {log.stem}


def test_two_servers_of_the_same_host_name_and_process_number_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    monkeypatch.setattr("os.getpid", lambda: 7)
    names = {server_name() for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("rollout-node-7-") for name in names)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_server_whose_engine_is_being_started_again(
    number: signal.Signals, model: Path, tmp_path: Path, free_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds, restarting = list[int](), asyncio.Event()

    async def start(config: RunConfig, *arguments: object, **options: object) -> ScriptedEngine:
        seeds.append(config.run.seed)
        if len(seeds) == 1:
            return ScriptedEngine(failure=EngineError("out of memory"))
        restarting.set()
        await asyncio.Event().wait()
        raise AssertionError("waits for ever")

    monkeypatch.setattr(build, "start_engine", start)
    monkeypatch.setattr("slipstream.rollout_servers.server.PRESSURE_INTERVAL_S", 0.01)
    config = RunConfig.model_validate(
        {
            "run": {"name": "line", "dir": tmp_path},
            "model": {"path": model},
            "env": {"name": "digits", "options": {"operation": "reverse", "length": 3}},
            "rewards": [{"name": "digit_match"}],
            "scoring": {"workers": 0},
            "buffer": {"bind": free_address, "endpoint": free_address},
            "weights": {"control_port": free_port()},
        }
    )
    serving = asyncio.create_task(serve(config, "server-1"))
    async with asyncio.timeout(30):
        await restarting.wait()
        os.kill(os.getpid(), number)
        assert await serving == 128 + number
    assert seeds == list(itertools.islice(engine_seeds(config, "server-1"), 2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_whose_env_takes_its_time(number: signal.Signals) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"build": "digits"},
            "env": {"name": f"{__name__}:endless", "options": {"number": int(number)}},
            "rewards": [{"name": "digit_match"}],
        }
    )
    with pytest.raises(SystemExit) as ended:
        asyncio.run(serve(config, "server-1"))
    assert ended.value.code == 128 + number


def endless(number: int) -> None:
    os.kill(os.getpid(), number)
    raise AssertionError("goes on until it is done")


def test_no_engine_of_a_run_has_the_random_numbers_of_another_one() -> None:
    config = RunConfig.model_validate({"model": {"build": "digits"}, "run": {"seed": 2**62}})
    seeds = [seed for name in ("server-1", "server-2") for seed in itertools.islice(engine_seeds(config, name), 100)]
    assert len(set(seeds)) == 200
    assert all(0 <= seed < 2**32 for seed in seeds), "what numpy takes"
