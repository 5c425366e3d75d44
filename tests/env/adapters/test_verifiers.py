"""Environments of verifiers, in the Python that has the package, played through the gateway: `make verifiers-check`."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.buffer.wire import codec
from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import EnvConfig
from slipstream.env.adapters.verifiers import Verifiers
from slipstream.env.base import EnvFailed
from slipstream.env.registry import build_env
from slipstream.models.tiny import CALLS, build_model
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers.rollouts.base import EpisodeFailed
from tests.rollout_servers.rollouts.chat import build_chat_model
from tests.rollout_servers.rollouts.gateway.harness import Recorder, served
from tests.rollout_servers.rollouts.test_conversation import chat_answer

PYTHON = os.environ.get("SLIPSTREAM_VERIFIERS_PYTHON", "")
ENVS = Path(__file__).parent / "verifiers_envs"
EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"

needs_verifiers = pytest.mark.skipif(not PYTHON, reason="make verifiers-check runs it")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", f"{ENVS}:{EXAMPLES}")
    built: list[Verifiers] = []

    def make(environment: str, **arguments: Any) -> Verifiers:
        env = build_env(EnvConfig(name="verifiers", options=options(environment, **arguments)))
        assert isinstance(env, Verifiers)
        built.append(env)
        return env

    yield make
    for env in built:
        env.close()


def options(environment: str, **arguments: Any) -> dict[str, Any]:
    return {"environment": environment, "python": PYTHON, "arguments": arguments}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("verifiers") / "model", "chatml")


@pytest.fixture(scope="module")
def answering(model: Path) -> Callable[..., Recorder]:
    tokenizer = Tokenizer(model)
    return lambda *texts: Recorder(None, [chat_answer(tokenizer, f"{text}<|im_end|>") for text in texts])


@needs_verifiers
async def test_single_turn_is_scored_by_its_rubric(model: Path, build: Any, answering: Any) -> None:
    env = build("sums")
    sizes = env.size("train"), env.size("eval")
    assert sum(sizes) == 40
    assert min(sizes) > 0
    shown = {
        split: {env.task(split, index).reference for index in range(env.size(split))} for split in ("train", "eval")
    }
    assert not shown["train"] & shown["eval"]
    task = env.task("train", 2)
    assert [message["content"] for message in task.prompt] == ["Add.", f"{int(task.reference) - 1} + 1"]
    assert env.fingerprint() != build("sums", rows=39).fingerprint()
    trajectories = []
    async with served(model, answering(task.reference, "none", ""), env) as player:
        for _ in range(3):
            trajectories += await player.play("train", 2, samples=1)
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 0.0, 0.0]
    assert [trajectory.scores["env/length"] for trajectory in trajectories] == [len(task.reference), 4, 0]


@needs_verifiers
@pytest.mark.parametrize(("fails", "reward"), [("", 1.0), ("reward", None), ("harness", None)])
async def test_taskset_is_played_by_its_harness(
    model: Path, build: Any, answering: Any, fails: str, reward: float | None
) -> None:
    env = build("capitals", agent={"runtime": {"type": "subprocess"}}, taskset={"fails": fails})
    task = env.task("train", 0)
    assert task.info["name"] == task.prompt.removeprefix("Capital of ")
    async with served(model, answering(f"{task.info['name']}ville"), env) as player:
        if reward is None:
            with pytest.raises(EpisodeFailed, match="broken") as failed:
                await player.play("train", 0, samples=1)
            assert failed.value.reason == "env_error"
        else:
            (trajectory,) = await player.play("train", 0, samples=1)
            assert (trajectory.reward, trajectory.scores["env/right"], trajectory.scores["env/words"]) == (
                1.0,
                1.0,
                1.0,
            )


@needs_verifiers
@pytest.mark.parametrize(("fault", "shown"), [("reward", "the judge is down"), ("process", "ended with code 7")])
async def test_failures_are_no_rewards(model: Path, build: Any, answering: Any, fault: str, shown: str) -> None:
    env = build("sums", fault=fault)
    async with served(model, answering("1", "2"), env) as player:
        for _ in range(2):  # a process that has ended is started again
            with pytest.raises(EpisodeFailed, match=shown) as failed:
                await player.play("train", 0, samples=1)
            assert failed.value.reason == "env_error"


@needs_verifiers
async def test_cancelled_rollout_ends(model: Path, build: Any, answering: Any) -> None:
    env = build("sums")
    begun = asyncio.Event()

    async def never(number: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    recorder = answering("1", "2")
    recorder.gate = never
    async with served(model, recorder, env) as player:
        playing = asyncio.create_task(player.play("train", 0, samples=1))
        async with asyncio.timeout(60):
            await begun.wait()
        playing.cancel()
        await asyncio.wait([playing])
        recorder.gate = None
        assert len(await player.play("train", 1, samples=1)) == 1


@needs_verifiers
@pytest.mark.parametrize(
    ("environment", "arguments", "shown"),
    [
        ("sums", {"fault": "load"}, "no data"),
        ("sums", {"fault": "group"}, "group"),
        ("sums", {"wrong": 1}, "wrong"),
        ("no-such-env", {}, "no_such_env"),
    ],
)
def test_unusable_environments_are_refused(build: Any, environment: str, arguments: Any, shown: str) -> None:
    with pytest.raises(ConfigError, match=shown):
        build(environment, **arguments)


@pytest.mark.parametrize("wrong", [{"python": "/no/such/python"}, {"concurrency": 0}, {"python": sys.executable}])
def test_unusable_options_are_refused(wrong: dict[str, Any]) -> None:
    given = {"environment": "no_such_environment", "python": sys.executable, **wrong}
    with pytest.raises(ConfigError):
        build_env(EnvConfig(name="verifiers", options=given))


FOREIGN = """#!/usr/bin/env python3
import json, sys, time
print("Welcome!"), print("[]"), print("{}")
print(json.dumps({"result": {"sizes": {"train": 1, "eval": 0}, "fingerprint": "1"}}), flush=True)
if PLACE.exists():
    for line in sys.stdin:
        result = {"prompt": "p", "reference": "r", "info": {}}
        print(json.dumps({"id": json.loads(line).get("id", -1), "result": result}), flush=True)
PLACE.touch()
time.sleep(600)
"""


def test_process_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(FOREIGN.replace("PLACE", f"__import__('pathlib').Path({str(tmp_path / 'started')!r})"))
    python.chmod(0o755)
    env = Verifiers("some", str(python))
    try:
        monkeypatch.setattr("slipstream.env.adapters.verifiers.TASK_S", 1.0)
        with pytest.raises(EnvFailed, match="no task within 1 s"):
            env.task("train", 0)
        monkeypatch.undo()
        assert env.task("train", 0).prompt == "p"
    finally:
        env.close()


CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "'


@needs_verifiers
async def test_lookup_earns_by_its_call(tmp_path: Path, build: Any) -> None:
    build_model(tmp_path / "model", CALLS, seed=0)
    env = build("lookup_verifiers", train_tasks=20)
    task = env.task("train", 0)
    key = task.info["key"]
    wrong = str((int(key) + 1) % 10)
    texts = [CALL + f'{key}"}}}}</tool_call>', task.reference, CALL + f'{wrong}"}}}}</tool_call>', "1", "3", CALL]
    tokenizer = Tokenizer(tmp_path / "model")
    recorder = Recorder(None, [chat_answer(tokenizer, f"{text}<eos>") for text in texts])
    config = load_config(EXAMPLES / "lookup_verifiers.yaml").rollout
    limits = {"sampling": config.sampling.model_dump(), "episode": config.episode.model_dump()}
    played = []
    async with served(tmp_path / "model", recorder, env, **limits) as player:
        for _ in range(4):
            played += await player.play("train", 0, samples=1)
    assert [trajectory.reward for trajectory in played] == [2.0, 1.5, 0.0, 0.5]
    assert [trajectory.scores["env/roots"] for trajectory in played] == [1.0] * 4
    assert [trajectory.scores["env/lookup_calls"] for trajectory in played] == [1.0, 1.0, 0.0, 0.0]
    context, answer = recorder.calls[1]
    assert codec.token_ids(played[0]).tolist() == context + list(answer.token_ids)
    assert chat_answer(tokenizer, task.reference).token_ids[0] in context


@needs_verifiers
async def test_budget_leaves_the_rollout_to_its_rubric(tmp_path: Path, build: Any) -> None:
    build_model(tmp_path / "model", CALLS, seed=0)
    env = build("lookup_verifiers", train_tasks=20)
    key = env.task("train", 0).info["key"]
    answer = chat_answer(Tokenizer(tmp_path / "model"), CALL + f'{key}"}}}}</tool_call><eos>')
    async with served(tmp_path / "model", Recorder(None, [answer]), env, episode={"turns": 1}) as player:
        (trajectory,) = await player.play("train", 0, samples=1)
    assert trajectory.reward == 2.0
