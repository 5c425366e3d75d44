"""Trainers on preferences: first losses by hand, learning, resume, two ranks, files that others load."""

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.buffer.wire.messages import Trajectory
from slipstream.configs.load import load_config
from slipstream.configs.schema.trainers import DataConfig
from slipstream.learner.data.packing import TokenSequence, pack
from slipstream.learner.data.preferences import RewardEncoder, read_pair
from slipstream.learner.models.load import ModelOptions
from slipstream.learner.models.scalar_head import ScalarModel, load_scalar_model, scalar_values
from slipstream.learner.parallel.mesh import World
from slipstream.models.tiny import TEXT, build_model
from slipstream.models.tokenizer import Tokenizer
from slipstream.rewards.functions.reward_model import RewardModel
from tests.conftest import free_port
from tests.learner.trainers.supervised.preferences import (
    STEPS,
    reversal_pairs,
    run_trainer,
    steps_of,
    write_rows,
    write_run,
)
from tests.rewards.episodes import episode

ROOT = Path(__file__).parents[4]
LOSSES: dict[str, tuple[Mapping[str, Any], float | None]] = {
    "dpo": ({"name": "dpo", "loss": "dpo"}, math.log(2)),
    "cdpo": ({"name": "dpo", "loss": {"name": "dpo", "label_smoothing": 0.1}}, math.log(2)),
    "ipo": ({"name": "dpo", "loss": {"name": "ipo", "beta": 0.25}}, 4.0),
    "simpo": ({"name": "dpo", "loss": "simpo"}, None),
    "kto": ({"name": "dpo", "loss": "kto"}, 0.5),
    "reward_model": ({"name": "reward_model", "margin": 0.0}, math.log(2)),
    "margin": ({"name": "reward_model"}, math.log(1 + math.exp(0.5))),
}
"""Trainers, and their losses before the first update: the policy is the reference, and a new head gives 0."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "pairs.jsonl", reversal_pairs(24))


@pytest.mark.parametrize("name", LOSSES)
def test_first_loss_is_known_and_falls(name: str, rows: Path, digits_model: Path, world: World, tmp_path: Path) -> None:
    trainer, first = LOSSES[name]
    file = write_run(tmp_path, name, digits_model, {**trainer, "data": str(rows)})
    steps = steps_of(run_trainer(file, world).paths)
    if first is not None:
        assert steps[1]["loss"] == pytest.approx(first, abs=1e-5)
    assert steps[STEPS]["loss"] < steps[1]["loss"]
    assert steps[STEPS]["accuracy"] > 0.5
    assert steps[1]["terms"] == (16 if name == "kto" else 8)


@pytest.mark.parametrize("name", ["kto", "margin"])
def test_resumed_training_is_bit_equal(name: str, rows: Path, digits_model: Path, world: World, tmp_path: Path) -> None:
    trainer = {**LOSSES[name][0], "data": str(rows)}
    whole, cut = (write_run(tmp_path, run, digits_model, trainer) for run in ("whole", "cut"))
    wanted = load_file(run_trainer(whole, world).paths.export / "model.safetensors")
    run_trainer(cut, world, stop_after=3)
    found = load_file(run_trainer(cut, world).paths.export / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[tensor], wanted[tensor]) for tensor in wanted)


def test_two_ranks_are_as_one(rows: Path, digits_model: Path, world: World, tmp_path: Path) -> None:
    trainers = {name: {**LOSSES[name][0], "data": str(rows)} for name in ("dpo", "kto", "margin")}
    alone = {name: write_run(tmp_path, f"{name}-alone", digits_model, trainer) for name, trainer in trainers.items()}
    together = [write_run(tmp_path, f"{name}-together", digits_model, trainer) for name, trainer in trainers.items()]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}",
        "-m", "tests.learner.trainers.supervised.preferences", *map(str, together),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for file, of_two in zip(alone.values(), together, strict=True):
        one, two = (steps_of(paths) for paths in (run_trainer(file, world).paths, load_config(of_two).paths))
        for step in one:
            # In the first step the policy is its own reference, and which answer is preferred is a matter of rounding.
            for metric in ("loss", "grad_norm", *(["accuracy"] if step > 1 else [])):
                assert two[step][metric] == pytest.approx(one[step][metric], rel=1e-3, abs=1e-5), (step, metric)


def chat_rows(count: int) -> list[dict[str, Any]]:
    """The same pairs as chats."""
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")},
        }
        for row in reversal_pairs(count)
    ]


@pytest.mark.parametrize("chat", [False, True])
async def test_reward_gives_the_scores_of_the_training(
    chat: bool, digits_model: Path, world: World, tmp_path: Path
) -> None:
    """Of texts, of messages, and of the tokens that a run has recorded for them."""
    model, rows = digits_model, reversal_pairs(8)
    if chat:
        model, rows = tmp_path / "text", chat_rows(8)
        build_model(model, TEXT, seed=0)
    data = write_rows(tmp_path / "rows.jsonl", rows)
    file = write_run(
        tmp_path, "run", model, {"name": "reward_model", "data": str(data), "rows_per_step": 2}, token_budget=128
    )
    config = run_trainer(file, world)
    trained = load_scalar_model(
        config.paths.export, ModelOptions(dtype=torch.float32, attention="auto"), world, bias=False
    )
    tokenizer = Tokenizer(model)
    encode, source = RewardEncoder(tokenizer), DataConfig(path="rows.jsonl")
    pairs = [read_pair(row, source, encode).sequences for row in rows]
    recorded = [encode(recorded_answer(tokenizer, row["prompt"], row["chosen"])) for row in rows]
    assert [each.token_ids.tolist() for each in recorded] == [chosen.token_ids.tolist() for chosen, _ in pairs]
    wanted = rewards_of(trained, [sequence for pair in pairs for sequence in pair])
    assert wanted.std() > 1e-3
    with closing(RewardModel(path=config.paths.export)) as reward:
        for number, row in enumerate(rows):
            for place, name in enumerate(("chosen", "rejected")):
                answer = row[name][0]["content"] if chat else row[name]
                score = await reward(replace(episode(answer), prompt=row["prompt"]))
                assert score.value == pytest.approx(wanted[2 * number + place].item(), abs=1e-6)
        await reward.endpoint.close()


def recorded_answer(tokenizer: Tokenizer, prompt: Any, answer: Any) -> Trajectory:
    """The trajectory that an engine would have left, which ends with the stop token."""
    text = answer if isinstance(answer, str) else answer[0]["content"]
    end = [] if isinstance(prompt, str) else [tokenizer.end_token_id]
    before, after = tokenizer.encode(prompt), [*tokenizer.encode_observation(text), *end]
    mask = [0] * len(before) + [1] * len(after)
    return Trajectory(
        token_ids=np.array(before + after, "<i4").tobytes(), action_mask=np.array(mask, "u1").tobytes(),
        behaviour_logprobs=np.zeros(len(mask), "<f4").tobytes(), spans=[], reward=1.0, scores={}, finish_reason="stop",
    )  # fmt: skip


@torch.no_grad()
def rewards_of(model: ScalarModel, sequences: Sequence[TokenSequence]) -> torch.Tensor:
    (batch,) = pack(sequences, token_budget=1 << 16)
    values_A = scalar_values(model, batch)
    return torch.zeros_like(values_A).index_copy(0, batch.rows_B[batch.sequence_A], values_A)
