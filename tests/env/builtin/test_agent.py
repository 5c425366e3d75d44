"""The env `agent`: commands and functions that play the tasks of another env."""

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import EnvConfig
from slipstream.env.base import AgentEndpoint, AgentEnv, Task, gives_rewards, runs_agents
from slipstream.env.builtin.agent import AgentFailed
from slipstream.env.registry import build_env

ENDPOINT = AgentEndpoint("http://127.0.0.1:1/s/abc", "a-key", "a-model")
TASKS = {"name": "lookup"}


def blocking(task: Task, endpoint: AgentEndpoint) -> float:
    assert threading.current_thread().name.startswith("agent")
    return float(task.prompt == "5=" and endpoint.base_url == "http://127.0.0.1:1/s/abc/v1")


async def running(task: Task, endpoint: AgentEndpoint) -> None:
    await asyncio.sleep(0)


def agent(**options: Any) -> AgentEnv:
    env = build_env(EnvConfig(name="agent", options={"tasks": TASKS, **options}))
    assert runs_agents(env)
    assert gives_rewards(env)
    return env


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_tasks_are_those_of_the_other_env() -> None:
    env, tasks = agent(function=f"{__name__}:running"), build_env(EnvConfig(**TASKS))
    assert env.task("train", 3) == tasks.task("train", 3)
    assert env.size("eval") == tasks.size("eval")
    assert env.fingerprint() != agent(function=f"{__name__}:blocking").fingerprint() != tasks.fingerprint()
    assert (env.from_outside, agent().from_outside, env.needs_reward) == (False, True, True)


@pytest.mark.parametrize(("function", "reward"), [("blocking", 1.0), ("running", None)])
async def test_function_is_called_with_task_and_endpoint(function: str, reward: float | None) -> None:
    env = agent(function=f"{__name__}:{function}")
    assert await env.run_agent(env.task("train", 0), ENDPOINT) == reward


async def test_command_finds_its_model_and_its_task(tmp_path: Path) -> None:
    file = tmp_path / "seen.json"
    code = f"import json, os, sys; json.dump([dict(os.environ), json.load(sys.stdin)], open({str(file)!r}, 'w'))"
    env = agent(command=program(code))
    task = env.task("train", 0)
    assert await env.run_agent(task, ENDPOINT) is None
    environment, given = json.loads(file.read_text())
    assert given == {"prompt": task.prompt, "reference": task.reference, "info": dict(task.info)}
    expected = {
        "OPENAI_BASE_URL": ENDPOINT.base_url,
        "OPENAI_API_KEY": "a-key",
        "OPENAI_MODEL": "a-model",
        "ANTHROPIC_BASE_URL": ENDPOINT.session_url,
        "ANTHROPIC_API_KEY": "a-key",
        "SLIPSTREAM_SESSION_URL": ENDPOINT.session_url,
    }
    assert expected.items() <= environment.items()


@pytest.mark.parametrize(
    ("code", "rewards", "reward"),
    [("pass", None, None), ("pass", {0: 1.0}, 1.0), ("raise SystemExit(3)", {0: 1, 3: 0.25}, 0.25)],
)
async def test_exit_code_gives_the_reward(code: str, rewards: Any, reward: float | None) -> None:
    env = agent(command=program(code), exit_rewards=rewards)
    assert await env.run_agent(env.task("train", 0), ENDPOINT) == reward


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("raise RuntimeError('broken harness')", "broken harness"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "-9"),
        ("print('x' * 10**6); raise SystemExit(7)", "7"),
    ],
)
async def test_other_exit_codes_are_failures(code: str, shown: str) -> None:
    env = agent(command=program(code), exit_rewards={0: 1.0})
    with pytest.raises(AgentFailed, match=shown):
        await env.run_agent(env.task("train", 0), ENDPOINT)


@pytest.mark.parametrize("is_daemon", [False, True])
async def test_children_that_hold_the_output_delay_nothing(tmp_path: Path, is_daemon: bool) -> None:
    file = tmp_path / "pid"
    code = (
        f"import subprocess; child = subprocess.Popen(['sleep', '600'], start_new_session={is_daemon});"
        f"open({str(file)!r}, 'w').write(str(child.pid)); print('x' * 10**6)"
    )
    env = agent(command=program(code), exit_rewards={0: 0.5})
    async with asyncio.timeout(60):
        assert await env.run_agent(env.task("train", 0), ENDPOINT) == 0.5
        pid = int(file.read_text())
        while is_running(pid):
            await asyncio.sleep(0.01)


async def test_cancelled_command_is_killed_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    code = (
        "import os, subprocess, time; child = subprocess.Popen(['sleep', '600']);"
        f"open({str(file)!r} + '.new', 'w').write(f'{{os.getpid()}} {{child.pid}}');"
        f"os.rename({str(file)!r} + '.new', {str(file)!r}); time.sleep(600)"
    )
    env = agent(command=program(code))
    playing = asyncio.create_task(env.run_agent(env.task("train", 0), ENDPOINT))
    async with asyncio.timeout(60):
        while not file.exists():
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.wait([playing])
        for pid in map(int, file.read_text().split()):
            while is_running(pid):
                await asyncio.sleep(0.01)


async def test_command_ends_with_a_killed_server(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    server = await asyncio.create_subprocess_exec(
        *program(
            "import asyncio, sys; from slipstream.env.builtin.agent import Command;"
            "from slipstream.env.base import AgentEndpoint, Task;"
            "play = Command([sys.executable, '-c', sys.argv[1]], concurrency=1, rewards={});"
            "asyncio.run(play(Task('', ''), AgentEndpoint('', '', '')))"
        ),
        code,
    )
    async with asyncio.timeout(60):
        while not file.exists() or not file.read_text():
            await asyncio.sleep(0.01)
        server.kill()
        while is_running(int(file.read_text())):
            await asyncio.sleep(0.01)
        await server.wait()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_commands_run_a_few_at_a_time(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; folder = sys.argv[1]; name = os.path.join(folder, str(os.getpid())); open(name, 'w');"
        "assert len(os.listdir(folder)) <= 2; time.sleep(0.05); os.remove(name)"
    )
    env = agent(command=[*program(code), str(tmp_path)], concurrency=2)
    await asyncio.gather(*(env.run_agent(env.task("train", 0), ENDPOINT) for _ in range(6)))


@pytest.mark.parametrize(
    "options",
    [
        {"command": "python agent.py"}, {"command": []}, {"command": ["true"], "function": "a:b"}, {"concurrency": 0},
        {"command": ["true"], "exit_rewards": {"zero": 1}}, {"exit_rewards": {0: 1}}, {"function": "no_such:module"},
        {"tasks": {"name": "no_such_env"}}, {"command": ["no-such-program-anywhere"]},
    ],
)  # fmt: skip
def test_unusable_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        agent(**options)


def unfinished() -> Any:
    return type("Unfinished", (), {"size": len, "task": len, "fingerprint": len, "run_agent": running})()


def test_attributes_of_agents_are_required() -> None:
    with pytest.raises(ConfigError, match="needs_reward"):
        build_env(EnvConfig(name=f"{__name__}:unfinished"))


def test_agents_play_no_part_of_a_mixture() -> None:
    part = {"name": "agent", "options": {"tasks": TASKS}}
    with pytest.raises(ConfigError, match="mix"):
        build_env(EnvConfig(name="mix", options={"envs": [part]}))
    assert os.environ.get("OPENAI_API_KEY") != "a-key"
