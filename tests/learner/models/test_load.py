"""Loading of models: dtype, remote code, dropout, activation checkpointing."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.data.packing import all_actions, pack
from slipstream.learner.export import export_model
from slipstream.learner.models import attention
from slipstream.learner.models.load import load_model
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl.step import TrainStep
from tests.learner.recorded import VOCABULARY, build_train_step, options_of, record, recorded_step, run_config, train
from tests.remote_code import with_remote_code

MakeConfig = Callable[..., RunConfig]
CRITIC = {"optimizer": {"lr": 3e-3, "warmup_steps": 0}}
DROPOUT = 0.5
BATCH = pack(
    [all_actions(np.random.default_rng(length).integers(0, VOCABULARY, length)) for length in (9, 14)], token_budget=40
)[0]


def in_dtype(config: RunConfig, dtype: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def test_training_in_bfloat16_is_near_float32(world: World, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(advantage="gae", critic=CRITIC, kl={"coefficient": 0.1}, activation_checkpointing="full")
    record(tmp_path / "groups", 2, config)
    exact, rounded = [
        train(build_train_step(in_dtype(config, dtype), world), tmp_path / "groups", [0, 1])[-1]
        for dtype in ("float32", "bfloat16")
    ]
    for figure in ("loss", "grad_norm", "value_loss", "critic_grad_norm", "reference_kl"):
        # The effect of rounding over two steps depends on the processor.
        assert rounded[figure] == pytest.approx(exact[figure], rel=0.2, abs=0.02), figure
        assert rounded[figure] != exact[figure], figure


def test_bfloat16_computes_on_fp32_weights(world: World, make_config: MakeConfig, tmp_path: Path) -> None:
    config = in_dtype(make_config(), "bfloat16")
    assert config.model.path is not None
    record(tmp_path / "groups", 1, config)
    batch = recorded_step(tmp_path / "groups", 0, config, rank=0, world_size=1).updates[0][0]
    model = load_model(config.model.path, options_of(config), world)
    attention.register()
    plain = AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.bfloat16, attn_implementation=config.learner.attention
    )
    with torch.no_grad():
        mine, theirs = (score_actions(each, batch, temperature=1.0).logprobs_A for each in (model, plain))
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    assert {tensor.dtype for _, tensor in full_weights(model)} == {torch.float32}


def test_model_that_needs_remote_code_is_refused(
    world: World, make_config: MakeConfig, digits_model: Path, tmp_path: Path
) -> None:
    copy = with_remote_code(digits_model, tmp_path, model_type="acme")
    with pytest.raises(ConfigError, match="needs code"):
        load_model(copy, options_of(make_config()), world)


def test_ignored_remote_code_is_logged(
    world: World, make_config: MakeConfig, digits_model: Path, tmp_path: Path
) -> None:
    kind = json.loads((digits_model / "config.json").read_text())["model_type"]
    copy = with_remote_code(digits_model, tmp_path, model_type=kind)
    with capture_logs() as logs:
        load_model(copy, options_of(make_config()), world)
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert (warning["code"], warning["trained_as"]) == ("acme.Model", "Qwen3ForCausalLM")


@pytest.fixture
def with_dropout(digits_model: Path, tmp_path: Path) -> MakeConfig:
    """Makes runs of a model whose attention has dropout, with reference and critic."""
    folder = shutil.copytree(digits_model, tmp_path / "with-dropout")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(settings | {"attention_dropout": DROPOUT}), encoding="utf-8")

    def make(**learner: Any) -> RunConfig:
        return run_config(folder, tmp_path, advantage="gae", critic=CRITIC, kl={"coefficient": 0.1}, **learner)

    return make


def scores(train_step: TrainStep) -> list[Tensor]:
    """Scores of the same actions by policy, reference and critic, with gradient."""
    assert train_step.reference is not None and train_step.critic is not None
    logprobs = [
        score_actions(model, BATCH, temperature=1.0).logprobs_A for model in (train_step.model, train_step.reference)
    ]
    return [*logprobs, train_step.critic.values(BATCH)]


@pytest.mark.parametrize(("checkpointing", "passes"), [("none", 1), ("selective", 2), ("full", 2)])
def test_models_have_no_dropout_and_recompute_activations(
    checkpointing: str, passes: int, world: World, with_dropout: MakeConfig
) -> None:
    train_step = build_train_step(with_dropout(activation_checkpointing=checkpointing), world)
    assert train_step.critic is not None
    nn.init.constant_(train_step.critic.model.get_parameter("score.weight"), 0.1)
    for once, again in zip(scores(train_step), scores(train_step), strict=True):
        assert once.std() > 0
        assert torch.equal(once, again)
    policy: Any = train_step.model
    backbone: Any = train_step.critic.model.base_model
    forward_passes: list[nn.Module] = []
    parts = [policy.model.layers[0].mlp, backbone.layers[0].mlp]
    for part in parts:
        part.register_forward_pre_hook(lambda module, _: forward_passes.append(module))
    for each in scores(train_step):
        if each.requires_grad:
            each.sum().backward()
    assert [forward_passes.count(part) for part in parts] == [passes, passes]


def test_disabled_dropout_is_logged_and_kept_in_export(
    world: World, with_dropout: MakeConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    run = with_dropout()
    assert run.model.path is not None
    with capture_logs() as logs:
        train_step = build_train_step(run, world)
        build_train_step(make_config(), world)  # of a model without dropout
    logged = [(line["model"], line["attention_dropout"]) for line in logs if "dropout" in line["event"]]
    assert logged == 3 * [(str(run.model.path), DROPOUT)]
    export_model(run.model.path, tmp_path / "exported", train_step.model, world, dtype=torch.float32)
    exported = json.loads((tmp_path / "exported" / "config.json").read_text(encoding="utf-8"))
    assert exported["attention_dropout"] == DROPOUT


def test_flash_attention_in_float32_is_refused(world: World, make_config: MakeConfig) -> None:
    config = make_config()
    options = replace(options_of(config), attention="flash_attention_2")
    assert config.model.path is not None
    with pytest.raises(ConfigError, match=r"learner\.attention=flash_attention_2 .* model\.dtype=bfloat16"):
        load_model(config.model.path, options, world)
