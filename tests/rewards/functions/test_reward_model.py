"""Tiny random classifiers: scores equal to transformers', one process for all workers, and its end."""

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import xxhash
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import RewardConfig
from slipstream.models.digits import build_digits_model
from slipstream.rewards.base import Episode, Failure, Result, RewardUnavailable, Score
from slipstream.rewards.functions.reward_model import RewardModel
from slipstream.rewards.registry import find_reward
from slipstream.rewards.runners.pool import PoolRunner
from tests.conftest import free_port
from tests.rewards.episodes import episode
from tests.rewards.functions.http_server import serving

PATIENCE_S = 120.0
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)
ANSWERS = ["5", "71", "1234567890", "c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of two labels with the tokenizer of the digits, whose texts are scored as they are."""
    path = tmp_path_factory.mktemp("models") / "classifier"
    build_digits_model(path, seed=0)
    config = Qwen3Config.from_pretrained(path, num_labels=2)
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(config).save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reward(folder: Path) -> Iterator[RewardModel]:
    with closing(RewardModel(path=folder, label=1)) as built:
        yield built


def expected(folder: Path, text: str) -> list[float]:
    """The logits by transformers, one text at a time."""
    model = Qwen3ForSequenceClassification.from_pretrained(folder, dtype="float32").eval()
    model.config.pad_token_id = 0
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        logits: list[float] = model(ids).logits[0].tolist()
    return logits


def chat(answer: str) -> Episode:
    return replace(episode(answer), prompt=[{"role": "user", "content": "2+3="}])


def models() -> list[psutil.Process]:
    """The living processes of models in batches of 2."""
    children = psutil.Process().children(recursive=True)
    living = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if '"batch": 2,' in child.cmdline()[-1]]


def parts(answer: str) -> Episode:
    content = [{"type": "text", "text": "2+"}, {"type": "text", "text": "3="}]
    return replace(episode(answer), prompt=[{"role": "user", "content": content}])


@pytest.mark.parametrize("subject", [episode, chat, parts])
async def test_scores_in_a_batch_equal_those_of_transformers(reward: RewardModel, folder: Path, subject: Any) -> None:
    scores = await asyncio.gather(*(reward(subject(answer)) for answer in ANSWERS))
    wanted = [expected(folder, f"2+3={answer}")[1] for answer in ANSWERS]
    assert [score.value for score in scores] == pytest.approx(wanted, abs=1e-5)
    (weights,) = {score.parts["weights"] for score in scores}
    (file,) = folder.glob("*.safetensors")
    assert weights == int(xxhash.xxh3_64(file.read_bytes()).hexdigest()[:6], 16)
    await reward.endpoint.close()


async def test_activation_gives_a_share(folder: Path) -> None:
    with closing(RewardModel(path=folder, activation=True)) as reward:
        wanted = torch.softmax(torch.tensor(expected(folder, "2+3=5")), 0)[0].item()
        assert (await reward(episode("5"))).value == pytest.approx(wanted, abs=1e-5)
        await reward.endpoint.close()


def values(group: list[list[Result]]) -> list[float]:
    return [result.value for (result,) in group if isinstance(result, Score)]


async def test_all_workers_share_a_process_that_starts_again(folder: Path) -> None:
    term = RewardConfig(name="quality", function="reward_model", options={"path": str(folder), "batch": 2})
    with closing(PoolRunner([term], workers=2, deadline_s=PATIENCE_S)) as runner:
        async with asyncio.timeout(2 * PATIENCE_S):
            subjects = [episode(answer) for answer in ANSWERS]
            wanted = pytest.approx([expected(folder, f"2+3={answer}")[0] for answer in ANSWERS], abs=1e-5)
            calls = runner.rewards["quality"].calls(len(subjects))
            groups = await asyncio.gather(*(runner.score(calls, subjects) for _ in range(2)))
            assert all(values(group) == wanted for group in groups)
            (process,) = models()
            os.kill(process.pid, signal.SIGKILL)
            while True:  # requests at the moment of its end fail, later ones wait for the next process
                group = await runner.score(calls, subjects)
                failures = [result for (result,) in group if isinstance(result, Failure)]
                if not failures:
                    break
                assert {failed.reason for failed in failures} == {"reward_unavailable"}
            assert values(group) == wanted
            assert models() != [process]
    assert models() == []


async def test_text_that_the_model_can_not_take_is_no_score(folder: Path) -> None:
    with closing(RewardModel(path=folder, label=7)) as reward:
        with pytest.raises(RewardUnavailable, match="label 7"):
            await reward(episode("5"))
        with pytest.raises(RewardUnavailable, match="400"):
            await reward(replace(episode("5"), prompt=[{"role": "tool", "content": "5"}]))
        await reward.endpoint.close()


@pytest.mark.parametrize("options", [{}, {"path": "a", "url": "b"}, {"path": "/nowhere"}, {"url": "b", "labels": 1}])
def test_unusable_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="reward_model"):
        find_reward(RewardConfig(name="reward_model", options=options))


def test_a_model_that_can_not_be_loaded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="can't be loaded"):
        RewardModel(path=tmp_path)


async def test_a_server_gets_the_shape_of_vllm() -> None:
    requests = []

    def classify(path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
        requests.append((path, body))
        return 200, {"model": "quality", "data": [{"index": 0, "label": None, "probs": [0.25], "num_classes": 1}]}

    with serving(classify) as url:
        reward = RewardModel(url=url, model="quality")
        scores = [await reward(subject) for subject in (episode("5"), chat("5"))]
        await reward.endpoint.close()
    assert [(score.value, score.parts) for score in scores] == [(0.25, {})] * 2
    messages = [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]
    assert requests == [
        ("/classify", {"model": "quality", "use_activation": False, "input": "2+3=5"}),
        ("/classify", {"model": "quality", "use_activation": False, "messages": messages}),
    ]


@pytest.fixture(scope="module")
def vllm_server(folder: Path) -> Iterator[str]:
    """The address of vLLM's server of the classifier."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    port = free_port()
    options = {"model": folder, "served-model-name": "quality", "runner": "pooling", "dtype": "float32"}
    options |= {"max-model-len": 128, "kv-cache-memory-bytes": 1 << 25, "host": "127.0.0.1", "port": port}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    quiet = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_CI_ENV": "1"}
    quiet |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment = os.environ | quiet
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as server:
        try:
            deadline = time.monotonic() + 2 * PATIENCE_S
            while not is_healthy(port) and server.poll() is None and time.monotonic() < deadline:
                threading.Event().wait(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").is_success
    except httpx.HTTPError:
        return False


@pytest.mark.soak  # vLLM's own server starts, and imports what no other test needs
async def test_vllm_gives_the_logits_of_transformers(vllm_server: str, folder: Path) -> None:
    wanted = [expected(folder, f"2+3={answer}")[1] for answer in ANSWERS]
    reward = RewardModel(url=vllm_server, model="quality", label=1)
    for subject in (episode, chat):
        scores = await asyncio.gather(*(reward(subject(answer)) for answer in ANSWERS))
        assert [score.value for score in scores] == pytest.approx(wanted, abs=1e-5)
    await reward.endpoint.close()
