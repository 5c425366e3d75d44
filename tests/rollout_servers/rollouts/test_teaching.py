"""Teachers as inference servers, their contexts, and failures that cost a group.

The server here has replies of the shape of vLLM's or SGLang's, from the logits of the real model; `make teacher-check`
compares them with those of vLLM's own server.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.buffer.wire import codec
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.base import Split, Task
from slipstream.models.digits import EOS, TOKENS
from slipstream.models.tokenizer import Tokenizer
from slipstream.rewards import teacher
from slipstream.rewards.base import Score
from slipstream.rewards.scorer import Scorer
from slipstream.rollout_servers.rollouts.base import EpisodeFailed
from slipstream.rollout_servers.rollouts.player import Player
from slipstream.rollout_servers.rollouts.teaching import Teaching
from tests.conftest import free_port
from tests.rewards.functions.http_server import serving
from tests.rollout_servers.scripted import ScriptedEngine, completion, ids, lasting

TOP_K = 4
WITH_VLLM = os.environ.get("SLIPSTREAM_TEACHER_SERVER") == "vllm"
START_DEADLINE_S = 600.0
ANSWERS = [completion([*ids("21"), TOKENS.index(EOS)]), completion(ids("24")), completion(ids("3"))]


@dataclass(frozen=True)
class OneTask:
    """An env of one task, whose reference is 21."""

    prompt: Any = "12r"

    def size(self, split: Split) -> int:
        return 1

    def task(self, split: Split, index: int) -> Task:
        return Task(prompt=self.prompt, reference="21")

    def fingerprint(self) -> str:
        return str(self.prompt)


class Served:
    """Replies of an inference server, computed by transformers; the first `failures` are errors, or have no log-probs.

    Attributes:
        shifted: the tokenizer has its tokens at other ids.
    """

    def __init__(self, folder: Path, *, failures: int = 0, shifted: bool = False) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = Tokenizer(folder)
        self.failures, self.shifted, self.requests = failures, shifted, 0

    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(input_ids=torch.tensor([token_ids])).logits[0]
        return logits.log_softmax(-1)

    def __call__(self, path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
        if path == "/detokenize":
            text = self.tokenizer.decode_as_served(
                [*body["tokens"][1:], body["tokens"][0]] if self.shifted else body["tokens"]
            )
            return 200, {"prompt": text, "text": text}
        self.requests += 1
        if self.requests <= self.failures:
            nothing = {"choices": [{"prompt_logprobs": [None] * len(body.get("prompt", []))}]}
            return (503, {"error": "busy"}) if self.requests % 2 else (200, nothing)
        return 200, self.of_vllm(body) if path == "/v1/completions" else self.of_sglang(body)

    def of_vllm(self, body: Any) -> Any:
        token_ids, scores = body["prompt"], list[Any]([None])
        for index, row in enumerate(self.logprobs(body["prompt"])[:-1]):
            order = row.argsort(descending=True).tolist()
            named = dict.fromkeys([token_ids[index + 1], *order[: body["prompt_logprobs"]]])
            scores.append({str(each): {"logprob": row[each].item(), "rank": order.index(each) + 1} for each in named})
        return {"choices": [{"index": 0, "text": "x", "prompt_logprobs": scores}]}

    def of_sglang(self, body: Any) -> Any:
        token_ids, first = body["input_ids"], body["logprob_start_len"]
        rows, k = self.logprobs(token_ids), body["top_logprobs_num"]
        own, top = list[Any]([[None, token_ids[first], None]]), list[Any]([None])
        for index in range(first + 1, len(token_ids)):
            row = rows[index - 1]
            own.append([row[token_ids[index]].item(), token_ids[index], None])
            top.append(
                [[value, token, None] for value, token in zip(*(each.tolist() for each in row.topk(k)), strict=True)]
            )
        return {"text": "", "meta_info": {"input_token_logprobs": own, "input_top_logprobs": top if k else []}}


def run_config(*teachers: dict[str, Any], **distill: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"build": "digits"},
            "rewards": [{"name": "exact_match"}],
            "scoring": {"workers": 0},
            "rollout": {"engine": {"max_model_len": 64}, "sampling": {"max_tokens": 4}},
            "learner": {
                "streams": {"rl": 0, "ref_kl": 1},
                "distill": {"teachers": [{"timeout_s": 20, **each} for each in teachers], **distill},
            },
        }
    )


async def open_player(config: RunConfig, model: Path, env: Any = None) -> Player:
    env, tokenizer = env or OneTask(), Tokenizer(model)
    engine, scorer = lasting(ScriptedEngine(ANSWERS), config.rollout), Scorer(config.rewards, config.scoring)
    return Player.from_config(config, env, tokenizer, engine, scorer, await Teaching.open(config, env, tokenizer))


@contextmanager
def server(model: Path, **options: Any) -> Iterator[tuple[str, Served]]:
    """A server with the model."""
    served = Served(model, **options)

    def reply(path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
        return served(path, headers, body)

    with serving(reply) as url:
        yield url, served


@pytest.fixture(autouse=True)
async def closed_servers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    opened, init = list[teacher.TeacherServer](), teacher.TeacherServer.__init__

    def opening(self: teacher.TeacherServer, *given: Any, **also: Any) -> None:
        init(self, *given, **also)
        self.endpoint._backoff_s = 0.01
        opened.append(self)

    async def model_name(self: teacher.TeacherServer) -> str:
        return "digits"

    monkeypatch.setattr(teacher.TeacherServer, "__init__", opening)
    if not WITH_VLLM:  # the server of these tests answers POST alone
        monkeypatch.setattr(teacher.TeacherServer, "_name", model_name)
    yield
    for each in opened:
        await each.close()


def expected(served: Served, trajectory: m.Trajectory, prompt: Sequence[int] | None = None) -> tuple[Tensor, Any]:
    """log π_T of the trajectory's actions, and its likeliest tokens at each of them."""
    token_ids, mask = codec.token_ids(trajectory).tolist(), codec.action_mask(trajectory).astype(bool)
    start = int(mask.argmax())
    token_ids = token_ids if prompt is None else [*prompt, *token_ids[start:]]
    first = start if prompt is None else len(prompt)
    rows = served.logprobs(token_ids)[first - 1 : -1]
    return rows.gather(1, torch.tensor(token_ids[first:])[:, None])[:, 0], rows.topk(TOP_K)


@contextmanager
def vllm_server(model: Path, folder: Path) -> Iterator[str]:
    """vLLM's own server with the model."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "8",
    ]  # fmt: skip
    log = (folder / "vllm.log").open("w")
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_DEADLINE_S
    try:
        while not is_ready(url):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "vllm.log").read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_server_scores_the_actions(model: Path, kind: str, tmp_path: Path) -> None:
    if WITH_VLLM and kind != "vllm":
        pytest.skip("the server is vLLM")
    with server(model) as (url, served), vllm_server(model, tmp_path) if WITH_VLLM else nullcontext(url) as asked:
        config = run_config({"url": asked, "server": kind}, loss="forward_kl", top_k=TOP_K)
        playing = await open_player(config, model)
        for trajectory in await playing.play("train", 0, samples=3):
            logprobs, top = expected(served, trajectory)
            np.testing.assert_allclose(np.frombuffer(trajectory.teacher_logprobs, "<f4"), logprobs, atol=1e-5)
            found = np.frombuffer(trajectory.teacher_top_ids, "<i4").reshape(-1, TOP_K)
            np.testing.assert_array_equal(found, top.indices)
            values = np.frombuffer(trajectory.teacher_top_logprobs, "<f4").reshape(-1, TOP_K)
            np.testing.assert_allclose(values, top.values, atol=1e-5)
            group = m.Group(id="1", kind=m.TRAIN, epoch=0, indices=[0], trajectories=[trajectory])
            assert codec.decode_group(codec.encode_group(group)) == group


async def test_failed_requests_are_repeated(model: Path) -> None:
    with server(model, failures=2) as (url, served):
        playing = await open_player(run_config({"url": url}, loss="advantage"), model)
        (first, *_) = await playing.play("train", 0, samples=3)
        assert len(first.teacher_logprobs) == 4 * 3
        assert not first.teacher_top_ids
        assert served.requests == 3 + 2


async def test_a_server_that_fails_costs_the_group(model: Path) -> None:
    with server(model, failures=10**6) as (url, _):
        playing = await open_player(run_config({"url": url}, loss="advantage"), model)
        with pytest.raises(EpisodeFailed) as failed:
            await playing.play("train", 0, samples=3)
    assert failed.value.reason == "teacher_unavailable"
    assert url in failed.value.detail
    assert failed.value.lengths == [3, 2, 1]


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
async def test_log_probs_that_are_not_finite_cost_the_group(
    bad: float, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Served, "logprobs", lambda self, token_ids: torch.full((len(token_ids), len(TOKENS)), bad))
    with server(model) as (url, _):
        playing = await open_player(run_config({"url": url}, loss="advantage"), model)
        with pytest.raises(EpisodeFailed) as failed:
            await playing.play("train", 0, samples=3)
    assert failed.value.reason == "teacher_unavailable"


async def test_held_out_answers_need_no_teacher(model: Path) -> None:
    with server(model, failures=10**6) as (url, _):
        playing = await open_player(run_config({"url": url}, loss="advantage"), model)
        (only,) = (await playing.play("eval", 0, samples=1))[:1]
    assert not only.teacher_logprobs


async def test_server_with_other_tokens_is_refused_by_name(model: Path) -> None:
    named = r"learner\.distill\.teachers\.0\.url=http.*tokens"
    with server(model, shifted=True) as (url, _), pytest.raises(ConfigError, match=named):
        await open_player(run_config({"url": url}, loss="advantage"), model)


def prompt_of(trajectory: m.Trajectory) -> list[int]:
    token_ids: list[int] = np.frombuffer(trajectory.teacher_prompt, dtype=m.TOKEN_DTYPE).tolist()
    return token_ids


async def test_context_has_the_reference(model: Path) -> None:
    config = run_config({"context": "{reference}+{prompt}"}, loss="reverse_kl")
    found = await (await open_player(config, model)).play("train", 0, samples=3)
    assert [prompt_of(each) for each in found] == [ids("21+12r")] * 3


async def test_context_has_the_solution_of_another_answer(model: Path) -> None:
    config = run_config({"context": "{solution}{prompt}"}, loss="reverse_kl")
    found = await (await open_player(config, model)).play("train", 0, samples=3)
    # The only right answer has no other one to learn from.
    assert [prompt_of(each) for each in found] == [[], ids("2112r"), ids("2112r")]


async def test_context_has_feedback_of_rewards(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config({"context": "{prompt}{feedback}"}, loss="reverse_kl")
    playing = await open_player(config, model)

    def said(answer: str, reference: str, info: Mapping[str, Any]) -> Score:
        return Score(float(answer == reference), feedback="" if answer == reference else "+")

    (reward,) = playing.scorer.runner.rewards.values()
    monkeypatch.setattr(playing.scorer.runner, "rewards", {reward.name: replace(reward, function=said)})
    found = await playing.play("train", 0, samples=3)
    assert [prompt_of(each) for each in found] == [[], ids("12r+"), ids("12r+")]


async def test_server_sees_the_context(model: Path) -> None:
    with server(model) as (url, served):
        config = run_config({"url": url, "context": "{reference}{prompt}"}, loss="advantage")
        for trajectory in await (await open_player(config, model)).play("train", 0, samples=3):
            logprobs, _ = expected(served, trajectory, ids("2112r"))
            np.testing.assert_allclose(np.frombuffer(trajectory.teacher_logprobs, "<f4"), logprobs, atol=1e-5)
