"""The console script `rollout`."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.buffer.service import BufferService
from slipstream.configs import RunConfig
from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import CERTAIN, ConfigError, RefusedError
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE
from slipstream.rollout_servers.cli import engine_seeds, serve, server_name
from slipstream.rollout_servers.engines import registry as build
from slipstream.rollout_servers.engines.base import EngineError
from slipstream.rollout_servers.plugins import plugin_code
from tests.buffer.peers import serving, until
from tests.rollout_servers.rollouts.chat import build_chat_model
from tests.rollout_servers.scripted import ScriptedEngine

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("env.name=digitz", "'digitz'"),
        ("buffer.filters=[{name: dynamic_sampling, score: env}]", "'env'"),
        ("rewards=[{name: exact_macht}]", "'exact_macht'"),
        ("security.keys=/nowhere", "/nowhere/rollout.key_secret"),
    ],
)
async def test_unusable_names_are_refused_before_the_engine_starts(
    override: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "start_engine", None)
    with pytest.raises(ConfigError, match=named):
        await serve(load_config(DEMO, [override]), "server-1")


def test_unusable_model_is_reported_and_secrets_are_hidden(tmp_path: Path) -> None:
    """What the server runs sees no secrets of others, and has a folder of its own for temporary files."""
    (tmp_path / "spies.py").write_text(
        "import json, os, subprocess, sys\n"
        "from slipstream.env.builtin.digits import Digits\n"
        "def record(name):\n"
        "    code = 'import json, os, tempfile; print(json.dumps([tempfile.gettempdir(), *os.environ]))'\n"
        "    done = subprocess.run([sys.executable, '-c', code], capture_output=True, check=True)\n"
        f"    open(f'{tmp_path}/{{name}}.json', 'wb').write(done.stdout)\n"
        "class Env(Digits):\n"
        "    def __init__(self):\n"
        "        super().__init__('copy')\n"
        "        record('env')\n"
        "class Reward:\n"
        "    def __init__(self):\n"
        "        record('reward')\n"
        "    def __call__(self, prompt, answer, reference):\n"
        "        return 0.0\n"
    )
    secrets = dict.fromkeys((REDIS_PASSWORD_VARIABLE, "SWANLAB_API_KEY", "JUDGES_KEY"), "hidden")
    overrides = ["env.name=spies:Env", "env.options={}", "rewards=[{name: spies:Reward}]", "model={path: /nowhere}"]
    command = [sys.executable, "-m", "slipstream.rollout_servers.cli", str(DEMO), f"run.dir={tmp_path}", *overrides]
    folders = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, **secrets, "PYTHONPATH": folders, "TMPDIR": str(temporary)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, env=environment)
    assert done.returncode == CERTAIN
    assert "model.path=/nowhere" in done.stderr
    assert not [word for word in ("engine starts", "Traceback") if word in done.stderr]
    (log,) = (tmp_path / "demo" / "logs").iterdir()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert "model.path=/nowhere" in lines[-1]["error"]
    assert {line["server"] for line in lines} == {log.stem}
    for name in ("env", "reward"):
        folder, *variables = json.loads((tmp_path / f"{name}.json").read_text())
        assert secrets.keys() & set(variables) == {"JUDGES_KEY"}
        assert Path(folder).parent == temporary
    assert list(temporary.iterdir()) == []


async def test_template_is_checked_for_the_tools_of_a_mixture(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"name": "digits", "label": "plain", "options": {"operation": "copy"}}
    parts = [plain, {**plain, "label": "with tools", "tools": [{"name": "calculator"}]}]
    config = RunConfig.model_validate(
        {
            "model": {"path": str(build_chat_model(tmp_path / "model", "chatml"))},
            "env": {"name": "mix", "options": {"envs": parts}},
            "rollout": {"engine": {"name": "hf"}},
        }
    )
    with pytest.raises(ConfigError, match="tool_prompt"):
        await serve(config, "server-1")


async def test_penalty_of_whole_answers_is_refused() -> None:
    overrides = ["rollout.overlong={cache_tokens: 5}", "rollout.episode.tokens=8"]
    with pytest.raises(ConfigError, match=r"rollout\.overlong\.cache_tokens=5 .*rollout\.sampling\.max_tokens=3"):
        await serve(load_config(DEMO, overrides), "server-1")


def test_servers_with_equal_host_and_process_id_differ_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    monkeypatch.setattr("os.getpid", lambda: 7)
    names = {server_name() for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("rollout-node-7-") for name in names)


@pytest.mark.parametrize(
    ("change", "key"),
    [({"model": {"dtype": "bfloat16"}}, r"model\.dtype"), ({"run": {"seed": 7}}, r"run\.seed")],
    ids=["dtype", "seed"],
)
async def test_differing_server_is_refused_before_its_engine(
    change: dict[str, dict[str, Any]],
    key: str,
    digits_settings: dict[str, Any],
    redis_url: str,
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start(*arguments: object, **options: object) -> ScriptedEngine:
        raise AssertionError("the engine starts")

    monkeypatch.setattr(build, "start_engine", start)
    settings = digits_settings | {
        "redis": {"url": redis_url},
        "run": digits_settings["run"] | {"name": run_name},
        "model": digits_settings["model"] | {"dtype": "float32"},
    }
    others = settings | {name: settings[name] | keys for name, keys in change.items()}
    async with serving(RunConfig.model_validate(settings)) as service:
        with pytest.raises(RefusedError, match=key):
            await serve(RunConfig.model_validate(others), "server-1")
        with pytest.raises(AssertionError, match="engine"):
            await serve(RunConfig.model_validate(settings), "server-1")
        await until(lambda: checked_and_left(service))


async def checked_and_left(service: BufferService) -> bool:
    """True if a server was accepted, and has left."""
    return "env" in await service.ledger.identity() and not service.fleet.servers


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 128 + signal.SIGINT)])
async def test_a_signal_ends_a_server_during_an_engine_restart(
    number: signal.Signals, code: int, digits_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds, restarting = list[int](), asyncio.Event()

    async def start(config: RunConfig, *arguments: object, **options: object) -> ScriptedEngine:
        seeds.append(config.run.seed)
        if len(seeds) == 1:
            return ScriptedEngine(failure=EngineError("out of memory"))
        restarting.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    monkeypatch.setattr(build, "start_engine", start)
    monkeypatch.setattr("slipstream.rollout_servers.server.PRESSURE_INTERVAL_S", 0.01)
    config = RunConfig.model_validate(digits_settings)
    serving = asyncio.create_task(serve(config, "server-1"))
    async with asyncio.timeout(30):
        await restarting.wait()
        os.kill(os.getpid(), number)
        assert await serving == code
    assert seeds == list(itertools.islice(engine_seeds(config.run.seed, "server-1"), 2))


async def test_server_ends_with_the_run(
    digits_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = asyncio.Event()

    async def start(*arguments: object, **options: object) -> ScriptedEngine:
        starting.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    monkeypatch.setattr(build, "start_engine", start)
    config = RunConfig.model_validate(digits_settings | {"run": digits_settings["run"] | {"dir": str(tmp_path)}})
    serving = asyncio.create_task(serve(config, "server-1", until_finished=True))
    async with asyncio.timeout(30):
        await starting.wait()
        config.paths.root.mkdir(parents=True, exist_ok=True)
        config.paths.summary.write_text("{}")
        assert await serving == 0
        assert await serve(config, "server-1", until_finished=True) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_while_its_env_is_built(number: signal.Signals) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"build": "digits"},
            "env": {"name": f"{__name__}:endless", "options": {"number": int(number)}},
            "rewards": [{"name": "digit_match"}],
        }
    )
    try:
        code: object = asyncio.run(serve(config, "server-1"))
    except SystemExit as ended:
        code = ended.code
    assert code == {signal.SIGTERM: 0, signal.SIGINT: 130}[number]


def endless(number: int) -> None:
    os.kill(os.getpid(), number)
    raise AssertionError("unreachable")


def test_every_engine_of_a_run_has_its_own_seed() -> None:
    seeds = [seed for name in ("server-1", "server-2") for seed in itertools.islice(engine_seeds(2**62, name), 100)]
    assert len(set(seeds)) == 200
    assert all(0 <= seed < 2**32 for seed in seeds), "numpy's range"


# --- the code of plug-ins in a server's hello -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "modules"),
    [
        ({}, []),
        ({"rewards": [{"name": "style", "function": "code_a:style"}]}, ["code_a"]),
        ({"rewards": [{"name": "code_a:style"}, {"name": "code_a:other"}]}, ["code_a"]),
        ({"eval": {"reward": "code_a:style"}}, ["code_a"]),
        ({"env": {"name": "code_a:Env", "tools": [{"name": "code_b:look"}]}}, ["code_a", "code_b"]),
        ({"env": {"name": "mix", "options": {"envs": [{"name": "code_a:Env"}, {"name": "digits"}]}}}, ["code_a"]),
        ({"rewards": [{"name": "by_source", "options": {"rewards": {"gsm8k": "code_b:x"}}}]}, ["code_b"]),
        ({"rewards": [{"name": "judge", "options": {"url": "http://judge:80", "model": "no_such:x"}}]}, []),
    ],
)
def test_hello_has_the_code_of_own_plugins(
    settings: dict[str, Any], modules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("code_a", "code_b"):
        (tmp_path / f"{name}.py").write_text("def style(answer, reference, info):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = RunConfig.model_validate({"model": {"build": "digits"}, **settings})
    found = plugin_code(config.env, (*config.rewards, *config.evaluated))
    assert list(found) == [f"code of {module}" for module in modules]
    assert all(found.values())
