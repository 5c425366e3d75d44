"""Ranks on several meshes: results equal to those of one rank, checkpoints that continue elsewhere, memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from slipstream.learner.checkpoint import TrainState, load_checkpoint, open_checkpoints, save_checkpoint
from slipstream.learner.data.packing import all_actions, pack
from slipstream.learner.models.layers import decoder_of
from slipstream.learner.models.load import ModelOptions, load_model
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.fsdp import reshard
from slipstream.learner.parallel.mesh import World
from tests.conftest import free_port
from tests.contract.experts import MODELS as EXPERTS
from tests.contract.experts import write_experts
from tests.learner.parallel.meshes import LARGE, ONE_EXPERT, STEPS
from tests.learner.recorded import (
    RECORDED_STEPS,
    build_train_step,
    record,
    require_same_weights,
    run_config,
    train,
    weights_of,
)

ROOT = Path(__file__).parents[3]
MB = 1 << 20


class Meshes:
    """Results of the phases, and those of one rank."""

    def __init__(self, folder: Path, alone: list[dict[str, float]], weights: dict[str, torch.Tensor]) -> None:
        self.folder = folder
        self.alone = alone
        """Figures of its steps."""
        self.weights = weights
        """After STEPS steps."""

    def results(self, phase: str, ranks: int) -> list[dict[str, Any]]:
        """Results of each rank of a phase."""
        return [json.loads((self.folder / f"results-{phase}-{rank}.json").read_text()) for rank in range(ranks)]


def write_large(folder: Path) -> None:
    """A model of 20 layers, 74 MB in bfloat16."""
    build: Any = Qwen3ForCausalLM
    config = Qwen3Config(
        vocab_size=256, hidden_size=256, intermediate_size=2048, num_hidden_layers=20, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=False,
    )  # fmt: skip
    build(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="20MB")


@pytest.fixture(scope="module")
def meshes(digits_model: Path, world: World, tmp_path_factory: pytest.TempPathFactory) -> Meshes:
    """One rank has trained in this process, ranks on several meshes in others."""
    folder = tmp_path_factory.mktemp("meshes")
    config = run_config(digits_model, folder, token_budget=80)
    record(folder / "groups", RECORDED_STEPS, config)
    (folder / "config.json").write_text(config.model_dump_json())
    write_large(folder / LARGE)
    for kind in EXPERTS:
        write_experts(folder / kind, kind)
    write_experts(folder / ONE_EXPERT, "qwen3_moe", num_experts=1, num_experts_per_tok=1)
    train_step = build_train_step(config, world)
    alone = train(train_step, folder / "groups", range(STEPS))
    weights = weights_of(train_step.model)
    open_checkpoints(folder / "one", world, keep=1)
    save_checkpoint(folder / "one", train_step.trained, TrainState(step=STEPS), world, keep=1)
    alone += train(train_step, folder / "groups", [STEPS])
    command = [sys.executable, "-m", "tests.learner.parallel.meshes", str(folder), str(free_port())]
    # glibc keeps freed memory of smaller blocks, which would count in the measured peaks.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MB // 4)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return Meshes(folder, alone, weights)


def require_equal(theirs: dict[str, float], mine: dict[str, float]) -> None:
    assert theirs["actions"] == mine["actions"]
    assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5)
    assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-5)
    assert theirs["kl_k3"] == pytest.approx(mine["kl_k3"], rel=1e-4)


def test_two_copies_of_two_shards_train_as_one_rank(meshes: Meshes) -> None:
    for rank in meshes.results("hsdp", 4):
        for mine, theirs in zip(meshes.alone, rank["figures"], strict=False):
            require_equal(theirs, mine)


def test_snapshot_of_copies_and_shards_has_weights_of_one_rank(meshes: Meshes) -> None:
    require_same_weights(load_file(meshes.folder / "snapshot.safetensors"), meshes.weights)


@pytest.mark.parametrize("saved", ["hsdp", "one", "background"])
def test_two_ranks_continue_checkpoint_of_other_mesh(saved: str, meshes: Meshes) -> None:
    for rank in meshes.results("resume", 2):
        (figures,) = rank[saved]
        require_equal(figures, meshes.alone[STEPS])
        assert figures["loss"] == pytest.approx(meshes.alone[STEPS]["loss"], abs=1e-6)


def test_one_rank_continues_checkpoint_of_copies_and_shards(meshes: Meshes, world: World, digits_model: Path) -> None:
    train_step = build_train_step(run_config(digits_model, meshes.folder), world)
    assert load_checkpoint(meshes.folder / "hsdp", train_step.trained, world, TrainState) == TrainState(step=STEPS)
    (figures,) = train(train_step, meshes.folder / "groups", [STEPS])
    require_equal(figures, meshes.alone[STEPS])


def test_sums_count_rows_that_ranks_share_once(meshes: Meshes) -> None:
    found = meshes.results("shared_rows", 4)
    assert [rank["data"] for rank in found] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert [rank["sums"] for rank in found] == [[2.0, 1.0]] * 4


def test_rank_loads_no_more_than_its_shards(meshes: Meshes) -> None:
    for rank in meshes.results("load_large", 2):
        assert rank["whole"] > 130 * MB
        assert rank["load"] < rank["whole"] / 2 + rank["largest"] + 15 * MB


def test_ranks_read_their_own_experts(meshes: Meshes) -> None:
    assert [rank["differ"] for rank in meshes.results("load_experts", 2)] == [[], []]


def test_snapshot_gathers_one_tensor_after_the_other(meshes: Meshes) -> None:
    root, other = meshes.results("load_large", 2)
    assert root["snapshot"] < root["whole"] / 2 + 2 * root["largest"] + 10 * MB, "one version in bfloat16"
    assert other["snapshot"] < 2 * other["largest"] + 10 * MB


def test_single_rank_keeps_layers_between_forward_and_backward(world: World, digits_model: Path) -> None:
    options = ModelOptions(dtype=torch.bfloat16, attention="segments")
    model = load_model(digits_model, options, world)
    (batch,) = pack([all_actions(np.arange(4, 9))], token_budget=8)

    def weights() -> set[tuple[bool, torch.dtype]]:
        """Of the layers: sharded or gathered, and their dtype."""
        return {(isinstance(each, DTensor), each.dtype) for each in decoder_of(model).layers.parameters()}

    sharded, gathered = {(True, torch.float32)}, {(False, torch.bfloat16)}
    assert weights() == sharded
    with torch.no_grad():
        score_actions(model, batch, temperature=1.0)
    assert weights() == gathered
    reshard(model)
    assert weights() == sharded, "an optimizer or a snapshot would get weights in bfloat16"
    scores = score_actions(model, batch, temperature=1.0)
    assert weights() == gathered
    scores.logprobs_A.sum().backward()
    assert weights() == sharded
