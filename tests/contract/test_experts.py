"""Mixtures of experts: experts that engines return with their answers."""

import asyncio
import importlib.util
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from slipstream.configs import RunConfig
from slipstream.learner.data.buffer_feed import token_sequence
from slipstream.learner.data.packing import pack
from slipstream.learner.models import attention
from slipstream.learner.models.layers import decoder_of
from slipstream.learner.models.moe import prepare_experts, routers
from slipstream.learner.models.scoring import score_actions
from slipstream.rollout_servers.engines.base import Completion, Request
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.rollouts.base import Prompt, Transcript
from tests.contract.engines import VLLM_WARNINGS
from tests.contract.experts import change, write_experts
from tests.contract.trainer import publish

EXACT = 1e-4
TOKENS = random.Random(0).choices(range(64), k=24)

pytestmark = [
    pytest.mark.usefixtures("prompt_vllm"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
    VLLM_WARNINGS,
]


def config_of(folder: Path, **engine: Any) -> RunConfig:
    """A run of the model in `folder`, whose engine returns experts."""
    sizes = {"max_model_len": 64, "max_sequences": 4, "kv_cache_bytes": 1 << 20, "start_deadline_s": 200}
    return RunConfig.model_validate(
        {
            "run": {"dir": folder.parent},
            "model": {"path": folder, "dtype": "float32"},
            "rollout": {"engine": {"core": "inline", **sizes, **engine}, "sampling": {"max_tokens": 8}},
            "learner": {"router_replay": True},
        }
    )


def request(prompt: Sequence[int], *, tokens: int, samples: int = 1) -> Request:
    return Request(prompt, deadline_s=100, samples=samples, max_tokens=tokens)


@torch.no_grad()
def chosen_by(model: Any, ids: Sequence[int]) -> NDArray[Any]:
    """Experts of each token under transformers, sorted, shape [tokens, layers, K]."""
    found: list[Any] = []
    hooks = [router.register_forward_hook(lambda _m, _i, out: found.append(out[2])) for router in routers(model)]
    model(torch.tensor([[*ids]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(found, dim=1).numpy(), axis=-1)


def returned(answer: Completion) -> NDArray[Any]:
    """Experts that came with an answer, sorted."""
    routed = answer.routed_experts
    assert routed is not None
    layout = routed.layout
    rows = np.frombuffer(routed.ids, dtype=layout.dtype).reshape(-1, layout.layers, layout.per_token)
    return np.sort(rows, axis=-1)


def agrees(answer: Completion, prompt: Sequence[int], model: Any, start: int = 0, end: int | None = None) -> bool:
    """True if the experts of the input tokens [start, end) are those of the model; rounding may change one or two."""
    inputs = [*prompt, *answer.token_ids][:-1]
    rows = returned(answer)
    assert len(rows) == len(inputs)
    differ = (rows != chosen_by(model, inputs)).any(-1)[start:end]
    return float(differ.mean()) < 0.01


async def test_engine_in_a_process_returns_experts_of_each_version(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_experts(folder, "mixtral")
    learner: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = await start_engine(config_of(folder, core="process"), folder, eos_token_ids=(1,))
    staging = Staging("experts", shared=True)
    try:
        for version in (1, 2):
            change(learner, seed=version)
            await engine.install(version, publish(learner, version, staging), staging)
            for answer in await engine.generate(request(TOKENS, tokens=8, samples=2)):
                assert agrees(answer, TOKENS, learner)
    finally:
        await engine.close()
        staging.abandon()


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model whose choice of experts has a bias of its own, and its folder."""
    folder = tmp_path_factory.mktemp("many") / "model"
    sizes = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "max_position_embeddings": 512}
    write_experts(folder, "glm4_moe", **sizes)
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def test_returned_experts_are_those_of_each_token(many_experts: tuple[Path, Any]) -> None:
    """In batches, of prompts in chunks and with shared prefixes, after preemptions, and across an update."""
    folder, learner = many_experts
    rng = random.Random(1)
    long, other, short = (rng.choices(range(64), k=tokens) for tokens in (300, 290, 5))
    # The cache has room for 640 tokens: for one or two of these requests.
    sizes = {"max_model_len": 448, "max_sequences": 8, "options": {"max_num_batched_tokens": 96}}
    engine: Any = await start_engine(config_of(folder, **sizes), folder, eos_token_ids=(1,))
    engine.generation = replace(engine.generation, ignore_eos=True, stop_token_ids=())
    try:
        prompts = [long, other, short, other[:200], long]
        asked = [request(prompt, tokens=100, samples=2 if prompt is short else 1) for prompt in prompts]
        answers = await asyncio.gather(*map(engine.generate, asked))
        assert (await engine.pressure()).preemptions > 0
        for prompt, of_prompt in zip(prompts, answers, strict=True):
            for answer in of_prompt:
                assert agrees(answer, prompt, learner)
        (again,) = await engine.generate(request(long, tokens=10))  # its first blocks are in the cache
        assert agrees(again, long, learner)

        replays_like_engine(learner, long, again)

        running = asyncio.create_task(engine.generate(request(short, tokens=440)))
        await engine.generate(request(short, tokens=30))
        before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        change(learner, seed=1)
        staging = Staging("experts", shared=False)
        manifest = publish(learner, 1, staging)
        await engine.install(1, manifest, staging)
        ((answer,),) = (await running,)
        assert [span.version for span in answer.spans] == [0, 1]
        seam = len(short) + answer.spans[1].start - 1
        assert agrees(answer, short, before, 0, seam)
        assert agrees(answer, short, learner, seam)
    finally:
        await engine.close()


def replays_like_engine(learner: Any, prompt: Sequence[int], answer: Completion) -> None:
    """Checks log-probs of a learner whose router would choose other experts."""
    transcript = Transcript.begin(Prompt(prompt))
    transcript.add_action(answer)
    sequence = token_sequence(transcript.trajectory(reward=0.0, scores={}, finish_reason="length", episode=0), {})
    assert sequence.routed_experts is not None
    (replayed,), (live,) = (
        pack([each], token_budget=512) for each in (sequence, replace(sequence, routed_experts=None))
    )
    attention.register()
    learner = AutoModelForCausalLM.from_pretrained(learner.name_or_path, attn_implementation=attention.NAME).eval()
    prepare_experts(learner, decoder_of(learner).layers, replays=True)
    router: Any
    for router in routers(learner):
        router.e_score_correction_bias.uniform_(0, 5)  # it changes the choice, and no weight
    off = [
        np.abs(score_actions(learner, batch, temperature=1.0).logprobs_A.detach().numpy() - answer.logprobs).max()
        for batch in (replayed, live)
    ]
    assert off[0] < EXACT
    assert off[1] > 1000 * EXACT
