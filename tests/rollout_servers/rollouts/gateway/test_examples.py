"""The examples of agents, as function and as program, against an engine with scripted answers."""

import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.buffer.wire import codec
from slipstream.configs.load import load_config
from slipstream.env.registry import build_env
from slipstream.models.tiny import CALLS, build_model
from slipstream.models.tokenizer import Tokenizer
from tests.rollout_servers.rollouts.gateway.harness import Recorder, served
from tests.rollout_servers.rollouts.test_conversation import chat_answer

EXAMPLES = Path(__file__).parents[4] / "examples" / "agents"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "model"
    build_model(folder, CALLS, seed=0)
    return folder


@pytest.fixture
def lookup(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return load_config(EXAMPLES / "lookup.yaml")


CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "'
WAYS: dict[str, dict[str, Any]] = {
    "function": {"function": "lookup:play"},
    "command": {"command": [sys.executable, str(EXAMPLES / "lookup.py")]},
}


@pytest.mark.parametrize(
    ("way", "text", "reward"),
    [
        ("function", CALL + '5"}}</tool_call>', 2.0),
        ("function", CALL + '4"}}</tool_call>', 1.5),
        ("function", "3" + CALL + '4"}}</tool_call>', 1.0),
        ("function", CALL, 0.5),
        ("function", "3", 0.0),
        ("command", CALL + '5"}}</tool_call>', 2.0),
        ("command", "3", 0.0),
    ],
)
async def test_lookup_earns_by_its_call(model: Path, lookup: Any, way: str, text: str, reward: float) -> None:
    options = {"tasks": {"name": "lookup"}, **WAYS[way]}
    env = build_env(lookup.env.model_copy(update={"options": options}))
    assert env.task("train", 0).prompt == "5="
    tokenizer = Tokenizer(model)
    recorder = Recorder(None, [chat_answer(tokenizer, f"{each}<eos>") for each in (text, "3")])
    sampling = {"sampling": lookup.rollout.sampling.model_dump(), "episode": lookup.rollout.episode.model_dump()}
    async with served(model, recorder, env, **sampling) as player:
        (trajectory,) = await player.play("train", 0, samples=1)
    assert trajectory.reward == reward
    calls = [context + list(answer.token_ids) for context, answer in recorder.calls]
    assert codec.token_ids(trajectory).tolist() == calls[-1]
    assert len(calls) == (2 if reward >= 1 else 1)
