"""Parallelism: four ranks on any mesh have the losses, gradients and published weights of one process."""

import json
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
)

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.checkpoint import TrainState, load_checkpoint
from slipstream.learner.parallel.mesh import MeshSizes, World, refuse
from tests.conftest import free_port
from tests.learner.parallel.axes import CASES, RANKS, SAVED, STEPS, case_config, saved_bytes, trained
from tests.learner.recorded import (
    VOCABULARY,
    build_train_step,
    record,
    require_same_weights,
    run_config,
    train,
    vivid,
    weights_of,
)
from tests.pipeline.forked import run_to_end

DIMENSIONS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
FIGURES = {"loss", "grad_norm", "entropy", "value_loss", "critic_grad_norm"}


@pytest.fixture(scope="module")
def four_ranks(forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which four ranks have left the results of all cases."""
    folder = tmp_path_factory.mktemp("axes")
    torch.manual_seed(0)
    models: dict[str, PreTrainedModel] = {
        "dense": Qwen3ForCausalLM(Qwen3Config(**DIMENSIONS, tie_word_embeddings=True)),
        "experts": Qwen3MoeForCausalLM(Qwen3MoeConfig(**DIMENSIONS, **EXPERTS)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        vivid(folder / name)
    settings = {"groups_per_step": RANKS, "updates_per_step": 1, "token_budget": 80}
    optimizer = {"lr": 0.1, "warmup_steps": 0, "final_lr_fraction": 1.0}
    config = run_config(folder / "dense", folder, optimizer=optimizer, **settings)
    record(folder / "groups", STEPS + 1, config)
    (folder / "config.json").write_text(config.model_dump_json(exclude_unset=True), encoding="utf-8")
    run_to_end(forks, "tests.learner.parallel.axes", folder, free_port(), output=folder / "output")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_training_on_mesh_equals_one_process(case: str, four_ranks: Path, world: World) -> None:
    config = case_config(four_ranks, case).model_copy()
    alone, weights = trained(config, four_ranks / "groups", world)
    together = json.loads((four_ranks / f"{case}.json").read_text(encoding="utf-8"))
    for mine, theirs in zip(alone, together, strict=True):
        assert mine["grad_norm"] > 0
        assert theirs["actions"] == mine["actions"]
        assert theirs["prefix_saving"] > 0.1 > mine["prefix_saving"]
        for figure in mine.keys() & FIGURES:
            assert theirs[figure] == pytest.approx(mine[figure], abs=1e-5, rel=1e-5), figure
    published = load_file(four_ranks / f"{case}.safetensors")
    if config.learner.optimizer.name == "muon":  # AdamW's are the embeddings
        require_same_weights(published, weights)
        return
    assert published.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(published[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("case", SAVED)
def test_checkpoint_of_mesh_continues_on_one_process(case: str, four_ranks: Path, world: World) -> None:
    config, groups = case_config(four_ranks, case), four_ranks / "groups"
    alone, resumed = build_train_step(config, world), build_train_step(config, world)
    train(alone, groups, [0])
    assert load_checkpoint(four_ranks / "saved" / case, resumed.trained, world, TrainState) == TrainState(step=1)
    (mine,), (theirs,) = train(alone, groups, [1]), train(resumed, groups, [1])
    assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5)
    weights = weights_of(resumed.model)
    for name, tensor in weights_of(alone.model).items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-3, msg=name)


def test_split_tokens_need_a_share_of_activation_memory(four_ranks: Path, world: World) -> None:
    alone = saved_bytes(build_train_step(case_config(four_ranks, "cp4"), world))
    for rank in range(RANKS):
        assert json.loads((four_ranks / f"bytes-{rank}.json").read_text(encoding="utf-8")) < 0.3 * alone


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (MeshSizes(cp=3), "cp"), (MeshSizes(cp=4, tp=2), "cp x tp"), (MeshSizes(tp=4), "tp"),
        (MeshSizes(ep=2, dp_shard=2), "no experts"),
    ],
)  # fmt: skip
def test_mesh_that_does_not_fit_dense_model_is_refused(sizes: MeshSizes, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        refuse(sizes, Qwen3Config(**DIMENSIONS))


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (MeshSizes(dp_shard=3, ep=3), "4 experts"),
        (MeshSizes(dp_shard=3, ep=2), "dp_shard x cp x tp = 3"),
        (MeshSizes(tp=2), "ep must be a multiple of tp"),
    ],
)
def test_mesh_that_does_not_fit_experts_is_refused(sizes: MeshSizes, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        refuse(sizes, Qwen3MoeConfig(**DIMENSIONS, **EXPERTS))


def test_layers_with_state_can_not_be_split() -> None:
    hybrid = Qwen3NextConfig(**DIMENSIONS, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ConfigError, match="linear_attention"):
        refuse(MeshSizes(cp=2), hybrid)


def test_adapters_have_no_plan() -> None:
    for sizes in (MeshSizes(dp_shard=2, cp=2), MeshSizes(dp_replicate=2)):
        refuse(sizes, Qwen3Config(**DIMENSIONS), adapters=True)
    with pytest.raises(ConfigError, match=r"model\.lora"):
        refuse(MeshSizes(tp=2), Qwen3Config(**DIMENSIONS), adapters=True)
