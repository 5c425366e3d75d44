"""The learner's models compute in `model.dtype`, as the engine does, on fp32 weights."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import torch
from transformers import AutoModelForCausalLM

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.models import attention
from slipstream.learner.models.load import load_model
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.assemble import model_options
from tests.learner.recorded import build_trainer, record, recorded_step, train
from tests.remote_code import with_remote_code

MakeConfig = Callable[..., RunConfig]
CRITIC = {"optimizer": {"lr": 3e-3, "warmup_steps": 0}}


def in_dtype(config: RunConfig, dtype: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "activation-checkpointing"])
def test_all_models_train_in_bfloat16_as_in_float32(
    world: World, make_config: MakeConfig, tmp_path: Path, checkpointing: bool
) -> None:
    config = make_config(
        advantage="gae", critic=CRITIC, kl={"coefficient": 0.1}, activation_checkpointing=checkpointing
    )
    record(tmp_path / "groups", 2, config)
    exact, rounded = [
        train(build_trainer(in_dtype(config, dtype), world), tmp_path / "groups", [0, 1])[-1]
        for dtype in ("float32", "bfloat16")
    ]
    for figure in ("loss", "grad_norm", "value_loss", "critic_grad_norm", "reference_kl"):
        # How far rounding leads them apart in two steps depends on the processor.
        assert rounded[figure] == pytest.approx(exact[figure], rel=0.2, abs=0.02), figure
        assert rounded[figure] != exact[figure], figure


def test_bfloat16_computes_on_fp32_weights(world: World, make_config: MakeConfig, tmp_path: Path) -> None:
    config = in_dtype(make_config(), "bfloat16")
    assert config.model.path is not None
    record(tmp_path / "groups", 1, config)
    batch = recorded_step(tmp_path / "groups", 0, config, rank=0, world_size=1).updates[0][0]
    model = load_model(config.model.path, model_options(config), world)
    attention.register()
    plain = AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.bfloat16, attn_implementation=config.learner.attention
    )
    with torch.no_grad():
        mine, theirs = (score_actions(each, batch, temperature=1.0).logprobs_A for each in (model, plain))
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    assert {tensor.dtype for _, tensor in full_weights(model)} == {torch.float32}


def test_a_model_that_needs_remote_code_is_refused(
    world: World, make_config: MakeConfig, digits_model: Path, tmp_path: Path
) -> None:
    copy = with_remote_code(digits_model, tmp_path, model_type="acme")
    with pytest.raises(ConfigError, match="needs code from its folder, which slipstream does not run"):
        load_model(copy, model_options(make_config()), world)


def test_ignored_remote_code_is_logged(
    world: World, make_config: MakeConfig, digits_model: Path, tmp_path: Path
) -> None:
    kind = json.loads((digits_model / "config.json").read_text())["model_type"]
    copy = with_remote_code(digits_model, tmp_path, model_type=kind)
    with structlog.testing.capture_logs() as said:
        load_model(copy, model_options(make_config()), world)
    (warning,) = [line for line in said if line["log_level"] == "warning"]
    assert (warning["code"], warning["trained_as"]) == ("acme.Model", "Qwen3ForCausalLM")
