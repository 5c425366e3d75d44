"""Trainers on preferences: first losses by hand, learning, resume, two ranks, files that others load."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from slipstream.buffer.store.kept import KeptGroups
from slipstream.buffer.wire.codec import encode_group
from slipstream.buffer.wire.messages import TRAIN, Group, Trajectory
from slipstream.configs.load import load_config
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.learner import CriticConfig
from slipstream.configs.schema.trainers import DataConfig, DpoConfig
from slipstream.learner.algorithms.critic import load_critic
from slipstream.learner.data.examples import UnusableRow
from slipstream.learner.data.packing import TokenSequence, all_actions, pack
from slipstream.learner.data.preferences import PolicyEncoder, RewardEncoder, read_pair
from slipstream.learner.metrics.catalog import CATALOG
from slipstream.learner.metrics.file_catalog import FILE_CATALOG
from slipstream.learner.models.load import ModelOptions
from slipstream.learner.models.scalar_head import ScalarModel, load_scalar_model, scalar_values
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.supervised.base import open_trainer_rows
from slipstream.models.tiny import TEXT, build_model
from slipstream.models.tokenizer import Tokenizer
from slipstream.rewards.functions.reward_model import RewardModel
from tests.conftest import free_port
from tests.learner.trainers.supervised.preferences import (
    OPTIMIZER,
    STEPS,
    reversal_pairs,
    run_trainer,
    steps_of,
    write_rows,
    write_run,
)
from tests.rewards.episodes import episode

OPTIONS = ModelOptions(dtype=torch.float32, attention="auto")
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


RECIPES = ("dpo", "cdpo", "ipo_pairs", "simpo", "kto", "reward_model", "value_model")


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


def recorded_answer(
    tokenizer: Tokenizer, prompt: Any, answer: Any, reward: float = 1.0, episode: int = 0
) -> Trajectory:
    """The trajectory that an engine would have left; of a chat it ends with the stop token."""
    text = answer if isinstance(answer, str) else answer[0]["content"]
    end = [] if isinstance(prompt, str) else [tokenizer.end_token_id]
    before, after = tokenizer.encode(prompt), [*tokenizer.encode_observation(text), *end]
    mask = [0] * len(before) + [1] * len(after)
    return Trajectory(
        token_ids=np.array(before + after, "<i4").tobytes(), action_mask=np.array(mask, "u1").tobytes(),
        behaviour_logprobs=np.zeros(len(mask), "<f4").tobytes(), spans=[], reward=reward, scores={},
        finish_reason="stop", episode=episode,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(digits_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an RL run that has kept groups of a right, a wrong and an empty answer; the last has no spread."""
    tokenizer, folder = Tokenizer(digits_model), tmp_path_factory.mktemp("runs") / "rl"
    kept = KeptGroups(RunPaths(folder).kept_groups)
    for number, row in enumerate(reversal_pairs(16)):
        rewards = {row["rejected"]: 0.0, row["chosen"]: 1.0, "s": 0.25} if number else {"s": 0.0, "c": 0.0}
        answers = [
            recorded_answer(tokenizer, row["prompt"], answer, reward, episode)
            for episode, (answer, reward) in enumerate(rewards.items())
        ]
        group = Group(id=str(number), kind=TRAIN, epoch=0, indices=[number], trajectories=answers)
        kept.write(number + 1, 0, {group.id: encode_group(group)})
    return folder


def test_groups_of_another_tokenizer_are_refused(run: Path, digits_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    options = DpoConfig.model_validate({"name": "dpo", "data": {"run": str(other)}})
    assert open_trainer_rows(options, digits_model, 0)[0].rows == 15, "the run's tokenizer is not known"
    build_model(RunPaths(other).initial_model, TEXT, seed=0)
    with pytest.raises(ConfigError, match="tokenizer"):
        open_trainer_rows(options, digits_model, 0)
    tokenizer = Tokenizer(digits_model)
    unknown = np.array([1, tokenizer.vocab_size], "<i4").tobytes()
    answer = msgspec.structs.replace(recorded_answer(tokenizer, "1", "2"), token_ids=unknown)
    with pytest.raises(UnusableRow):
        PolicyEncoder(tokenizer)(msgspec.structs.replace(answer, action_mask=b"\0\1"))


def test_policy_learns_from_the_groups_of_a_run(run: Path, digits_model: Path, world: World, tmp_path: Path) -> None:
    trainer = {"name": "dpo", "data": {"run": str(run)}, "validation": {"rows": 5, "every_steps": 3}}
    config = run_trainer(write_run(tmp_path, "dpo", digits_model, trainer), world)
    steps = steps_of(config.paths)
    assert steps[1]["epoch"] == pytest.approx(8 / 10), "of 16 groups, one without spread and five held out"
    assert steps[STEPS]["accuracy"] > 0.7
    records = [json.loads(line) for line in config.paths.metrics.read_text(encoding="utf-8").splitlines()]
    validated = [record["loss"] for record in records if record["kind"] == "eval"]
    assert validated[0] == pytest.approx(math.log(2), abs=1e-5)
    assert validated[-1] < validated[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains(recipe: str, run: Path, world: World, tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path}", f"learner.trainer.data=[{{run: {run}}}]", "learner.trainer.rows_per_step=5"]
    overrides += ["learner.trainer.validation.rows=5", "learner.steps=2", "learner.optimizer.warmup_steps=0"]
    config = run_trainer(ROOT / "configs" / "recipes" / f"{recipe}.yaml", world, *overrides)
    records = [json.loads(line) for line in config.paths.metrics.read_text(encoding="utf-8").splitlines()]
    for record in (record for record in records if record["kind"] in ("step", "eval")):
        assert all(math.isfinite(value) for value in record.values() if isinstance(value, float)), record
        known = (*CATALOG[record["kind"]], *FILE_CATALOG[record["kind"]])
        assert [key for key in record if key != "kind" and not any(each.matches(key) for each in known)] == []
    assert steps_of(config.paths)[2]["grad_norm"] > 0


def test_adapters_have_their_base_as_reference(rows: Path, digits_model: Path, world: World, tmp_path: Path) -> None:
    file = write_run(tmp_path, "lora", digits_model, {"name": "dpo", "data": str(rows)})
    config = json.loads(file.read_text(encoding="utf-8"))
    config["model"]["lora"] = {"rank": 4, "export": "adapter"}
    file.write_text(json.dumps(config), encoding="utf-8")
    steps = steps_of(run_trainer(file, world).paths)
    assert steps[1]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert steps[STEPS]["loss"] < steps[1]["loss"]
    config["learner"]["trainer"]["name"] = "reward_model"
    file.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match="lora"):
        run_trainer(file, world)


def test_critic_takes_a_value_model_of_a_run(run: Path, digits_model: Path, world: World, tmp_path: Path) -> None:
    trainer = {"name": "value_model", "data": {"run": str(run)}}
    file = write_run(tmp_path, "value", digits_model, trainer, optimizer={**OPTIMIZER, "lr": 5e-3})
    config = run_trainer(file, world)
    steps = steps_of(config.paths)
    assert steps[1]["value_explained"] < 0
    assert steps[STEPS]["value_explained"] > 0.2
    critic = load_critic(CriticConfig(path=config.paths.export), digits_model, OPTIONS, world)
    assert critic is not None
    (batch,) = pack([all_actions(np.array(Tokenizer(digits_model).encode("12r21")))], token_budget=16)
    with torch.no_grad():
        values = critic.values(batch)
        of_files = AutoModelForTokenClassification.from_pretrained(config.paths.export).eval()
        torch.testing.assert_close(values, of_files(batch.input_ids_1N).logits[0, :, 0], rtol=1e-5, atol=1e-6)
    assert values.abs().max() > 1e-2


@torch.no_grad()
def rewards_of(model: ScalarModel, sequences: Sequence[TokenSequence]) -> torch.Tensor:
    (batch,) = pack(sequences, token_budget=1 << 16)
    values_A = scalar_values(model, batch)
    return torch.zeros_like(values_A).index_copy(0, batch.rows_B[batch.sequence_A], values_A)
