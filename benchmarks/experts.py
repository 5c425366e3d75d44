"""Mismatch of engine and learner on a mixture of experts, with router replay and without."""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.figures import Figure, Figures
from benchmarks.step import qwen3
from slipstream.buffer.wire.codec import behaviour_logprobs
from slipstream.buffer.wire.messages import Trajectory
from slipstream.configs import RunConfig
from slipstream.learner.data.buffer_feed import token_sequence
from slipstream.learner.data.packing import pack
from slipstream.learner.models.load import ModelOptions, load_model
from slipstream.learner.models.moe import expert_metrics
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.mesh import World, join_world, leave_world
from slipstream.rollout_servers.engines.base import Request
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.rollouts.base import Prompt, Transcript
from slipstream.tools.cli import at_least

VOCABULARY, PROMPT_TOKENS, SAMPLES = 512, 64, 8
TOKEN_BUDGET = 4096
DEADLINE_S = 600.0


def build(folder: Path, *, layers: int, experts: int, per_token: int) -> None:
    """Writes a random Qwen3-MoE, whose distributions are as peaked as those of a trained model."""
    torch.manual_seed(0)
    changes = {
        "moe_intermediate_size": 64, "num_experts": experts, "num_experts_per_tok": per_token, "norm_topk_prob": True,
        "head_dim": 32, "max_position_embeddings": 1024,
    }  # fmt: skip
    config = qwen3(vocabulary=VOCABULARY, hidden=128, layers=layers, heads=4, kv_heads=2, **changes)
    make: Any = Qwen3MoeForCausalLM
    model = make(Qwen3MoeConfig(**config | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    nn.init.normal_(model.lm_head.weight, std=0.2)
    model.save_pretrained(folder)


def run_config(model: Path, folder: Path, *, dtype: str, replay: bool, tokens: int) -> RunConfig:
    """A run of the model; its engine is vLLM in this process."""
    engine = {"core": "inline", "max_model_len": PROMPT_TOKENS + tokens, "max_sequences": 32}
    return RunConfig.model_validate(
        {
            "run": {"dir": folder},
            "model": {"path": model, "dtype": dtype},
            "rollout": {"engine": engine, "sampling": {"max_tokens": tokens, "ignore_eos": True}},
            "learner": {"router_replay": replay},
        }
    )


async def generate(config: RunConfig, model: Path, *, prompts: int) -> list[Trajectory]:
    """Answers of the engine to random prompts, with the experts that it chose."""
    engine = await start_engine(config, model, eos_token_ids=())
    generator = torch.Generator().manual_seed(1)
    try:
        asked = [torch.randint(VOCABULARY, (PROMPT_TOKENS,), generator=generator).tolist() for _ in range(prompts)]
        answers = await asyncio.gather(
            *(engine.generate(Request(prompt, deadline_s=DEADLINE_S, samples=SAMPLES)) for prompt in asked)
        )
    finally:
        await engine.close()
    found = []
    for prompt, of_prompt in zip(asked, answers, strict=True):
        for answer in of_prompt:
            transcript = Transcript.begin(Prompt(prompt))
            transcript.add_action(answer)
            found.append(transcript.trajectory(reward=0.0, scores={}, finish_reason="length", episode=0))
    return found


def deviations(config: RunConfig, model: Path, answers: Sequence[Trajectory], world: World) -> tuple[Tensor, float]:
    """|Δ log-prob| of each action between engine and learner, and the share of experts that the router would change."""
    policy = load_model(model, ModelOptions.of(config.model, config.learner), world)
    sequences = [token_sequence(answer, {}) for answer in answers]
    if not config.learner.router_replay:
        sequences = [replace(each, routed_experts=None) for each in sequences]
    found = []
    for batch in pack(sequences, token_budget=TOKEN_BUDGET):
        scored_A = score_actions(policy, batch, temperature=1.0).logprobs_A.detach()
        rows = [torch.from_numpy(behaviour_logprobs(answers[int(row)]).copy())[PROMPT_TOKENS:] for row in batch.rows_B]
        found.append((scored_A - torch.cat(rows)).abs())
    return torch.cat(found), expert_metrics(policy, world).get("experts/changed", 0.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Sizes of the random model and of the answers."""
    add, positive = parser.add_argument, at_least(1)
    add("--layers", type=positive, default=4, help="of the model")
    add("--experts", type=positive, default=16, help="of a layer")
    add("--per-token", type=positive, default=4, help="experts of a token")
    add("--prompts", type=positive, default=8, help=f"prompts with {SAMPLES} answers each")
    add("--tokens", type=positive, default=128, help="of an answer")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows the figures of one engine, and learners of two dtypes."""
    with TemporaryDirectory(prefix="slipstream-bench-") as folder:
        model = Path(folder) / "model"
        build(model, layers=options.layers, experts=options.experts, per_token=options.per_token)

        def config(dtype: str, *, replay: bool) -> RunConfig:
            return run_config(model, Path(folder), dtype=dtype, replay=replay, tokens=options.tokens)

        answers = asyncio.run(generate(config("bfloat16", replay=True), model, prompts=options.prompts))
        figures.show(Figure("actions", sum(int(sum(answer.action_mask)) for answer in answers)))
        world = join_world()
        try:
            for dtype, replay in product(("float32", "bfloat16"), (False, True)):
                off, changed = deviations(config(dtype, replay=replay), model, answers, world)
                name = f"|Δ log-prob|, {dtype}, {'replayed' if replay else 'live'}"
                figures.show(
                    Figure(f"{name}: mean", off.mean().item(), "nats"),
                    Figure(f"{name}: 99 %", off.quantile(0.99).item(), "nats"),
                    Figure(f"{name}: largest", off.max().item(), "nats"),
                )
                if replay:
                    figures.show(Figure(f"choices that a {dtype} router changes", changed))
        finally:
            leave_world()
    return {}
