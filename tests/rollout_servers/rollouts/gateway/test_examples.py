"""The examples of agents, as function, as program and in environments of their own, against scripted answers."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.buffer.wire import codec
from slipstream.configs.load import load_config
from slipstream.env.registry import build_env
from slipstream.models.tiny import CALLS, build_model
from slipstream.models.tokenizer import Tokenizer
from tests.rollout_servers.rollouts.gateway.harness import Recorder, run_config, served
from tests.rollout_servers.rollouts.test_conversation import chat_answer

ROOT = Path(__file__).parents[4]
DEADLINE_S = 120.0
EXAMPLES = ROOT / "examples" / "agents"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "model"
    build_model(folder, CALLS, seed=0)
    return folder


@pytest.fixture
def lookup(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return load_config(EXAMPLES / "lookup.yaml")


def call(name: str, argument: str, value: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"{argument}": "{value}"}}}}</tool_call>'


RIGHT, WRONG = call("lookup", "key", "5"), call("lookup", "key", "4")
WAYS: dict[str, dict[str, Any]] = {
    "function": {"function": "lookup:play"},
    "command": {"command": [sys.executable, str(EXAMPLES / "lookup.py")]},
}


@pytest.mark.parametrize(
    ("way", "text", "reward"),
    [
        ("function", RIGHT, 1.0),
        ("function", WRONG, 0.0),
        ("function", RIGHT + RIGHT, 0.0),
        ("function", '<tool_call>{"name": "lookup", "arguments": {"key": "', 0.0),
        ("command", RIGHT, 1.0),
        ("command", "3", 0.0),
    ],
)
async def test_lookup_earns_by_its_call(model: Path, lookup: Any, way: str, text: str, reward: float) -> None:
    options = {"tasks": {"name": "lookup"}, **WAYS[way]}
    env = build_env(lookup.env.model_copy(update={"options": options}))
    assert env.task("train", 0).prompt == "5="
    recorder = scripted(model, text, "3")
    async with served(model, recorder, env, **rollout_of(lookup)) as player:
        (trajectory,) = await player.play("train", 0, samples=1)
    assert trajectory.reward == reward
    calls = [context + list(answer.token_ids) for context, answer in recorder.calls]
    assert codec.token_ids(trajectory).tolist() == calls[-1]
    assert len(calls) == (2 if text.endswith("</tool_call>") else 1)


def scripted(model: Path, *texts: str) -> Recorder:
    tokenizer = Tokenizer(model)
    return Recorder(None, [chat_answer(tokenizer, f"{text}<eos>") for text in texts])


def rollout_of(config: Any) -> dict[str, Any]:
    return {"sampling": config.rollout.sampling.model_dump(), "episode": config.rollout.episode.model_dump()}


BASH = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo "
HARNESSES = {
    "http": ("", ["VALUE"], ["5="]),
    # smolagents repeats its calls as text, so each call is a sequence of its own.
    "smolagents": (
        "smol.py",
        [RIGHT, call("final_answer", "answer", "VALUE")],
        ["ooinnswer5=", "ooinnswer5=<eos>VALUE"],
    ),
    "mini-swe-agent": (
        "mini.py",
        [call("bash", "command", "lookup 5"), call("bash", "command", f"{BASH}VALUE")],
        ["sh5=" + call("bash", "command", "lookup 5") + "<eos>VALUE="],
    ),
}


BY_HTTP = """
from outside import main, post


def play(session):
    messages = [{"role": "user", "content": session["task"]["prompt"]}]
    post(f"{session['base_url']}/chat/completions", session["api_key"], {"messages": messages})
    return {"lookup": 0.5, "answer": 0.5}


main(play, threads=2)
"""


def harness_of(name: str, folder: Path) -> tuple[Path, Path]:
    """Its Python, and the script by which it plays."""
    if name == "http":
        script = folder / "by_http.py"
        script.write_text(BY_HTTP, encoding="utf-8")
        return Path(sys.executable), script
    python = ROOT / ".agents" / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is not there: sh examples/agents/setup.sh {name}")
    return python, EXAMPLES / HARNESSES[name][0]


@pytest.mark.parametrize("name", HARNESSES)
async def test_harness_in_its_environment_plays_lookup(
    model: Path, lookup: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, script = harness_of(name, tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    env = build_env(load_config(EXAMPLES / "harness.yaml").env)
    task = env.task("train", 0)
    _, texts, prompts = HARNESSES[name]
    value = value_of(task.info)
    recorder = scripted(model, *(text.replace("VALUE", value) for text in texts))
    async with served(model, recorder, env, **rollout_of(lookup)) as player:
        command = [str(python), str(script), str(run_config(model).paths.root)]
        with subprocess.Popen(command) as harness:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    trajectories = await player.play("train", 0, samples=1)
            finally:
                harness.terminate()
    assert trajectories[0].scores | {"env/lookup": 0.5, "env/answer": 0.5} == trajectories[0].scores
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * len(prompts)
    calls = [context + list(answer.token_ids) for context, answer in recorder.calls]
    assert [codec.token_ids(trajectory).tolist() for trajectory in trajectories] == calls[-len(prompts) :]
    decoded = [Tokenizer(model).decode_whole(context) for context, _ in recorder.calls]
    assert decoded[-len(prompts) :] == [prompt.replace("VALUE", value) for prompt in prompts]


def value_of(info: Any) -> str:
    from table import value_of  # of the examples

    value: str = value_of(info, info["key"])
    return value


async def test_agents_of_a_team_have_labels_and_rewards(model: Path, lookup: Any) -> None:
    config = load_config(EXAMPLES / "team.yaml")
    assert config.learner.advantage.name == "rae_group"
    env = build_env(config.env)
    value = value_of({**env.task("train", 0).info, "key": "4"})
    recorder = scripted(model, WRONG, WRONG, value, value)
    async with served(model, recorder, env, **rollout_of(config)) as player:
        helper, main = await player.play("train", 0, samples=1)
    ends = [[span.end for span in trajectory.agents] for trajectory in (helper, main)]
    assert [[(span.agent, span.reward) for span in each.agents] for each in (helper, main)] == [
        [("helper", 0.0), ("helper", 1.0)],
        [("main", 0.0), ("main", 0.0)],
    ]
    assert ends[1][-1] == len(codec.action_mask(main))
    assert helper.reward == main.reward == 1.0
