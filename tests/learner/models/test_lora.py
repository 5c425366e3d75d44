"""Adapters in the learner: what is trained, saved, and used as the reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.learner import OptimizerConfig
from slipstream.configs.schema.model import LoraConfig
from slipstream.learner.checkpoint import CheckpointError, TrainState, load_checkpoint, save_checkpoint
from slipstream.learner.export import export_model
from slipstream.learner.models.lora import (
    AdapterStateDict,
    add_adapters,
    init_adapters,
    merged_weights,
    without_adapters,
)
from slipstream.learner.models.optim import build_optimizer
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl.step import TrainStep
from slipstream.learner.weights.snapshot import SnapshotTaker
from tests.learner.recorded import build_train_step, train, weights_of

MakeConfig = Callable[..., RunConfig]
TOKENS = torch.tensor([[3, 17, 4, 9, 9, 30]])
LORA = {"rank": 4, "alpha": 16}


@pytest.fixture
def make_lora(make_config: MakeConfig) -> MakeConfig:
    """A run's configuration with adapters; keyword arguments replace settings of `learner`."""

    def make(lora: dict[str, Any] = LORA, **learner: Any) -> RunConfig:
        tree = make_config(**learner).model_dump(mode="json", exclude_unset=True)
        return RunConfig.model_validate(tree | {"model": tree["model"] | {"lora": lora}})

    return make


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TOKENS, use_cache=False, segment_lengths=[TOKENS.shape[1]]).logits
    return found


def initial(config: RunConfig) -> Any:
    """The base model, by transformers."""
    assert config.model.path is not None
    return AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32, attn_implementation="eager")


def adapters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in AdapterStateDict(model, dtype=torch.float32).gather()}


@pytest.fixture
def trained(world: World, make_lora: MakeConfig, groups: Path) -> TrainStep:
    """Adapters after two steps."""
    train_step = build_train_step(make_lora(), world)
    train(train_step, groups, [0, 1])
    return train_step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_are_trained(world: World, make_lora: MakeConfig, groups: Path, dtype: str) -> None:
    config = make_lora()
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    train_step = build_train_step(config, world)
    before = weights_of(train_step.model)
    figures = train(train_step, groups, [0, 1])
    assert all(step["grad_norm"] > 0 for step in figures)
    for name, tensor in weights_of(train_step.model).items():
        assert torch.equal(tensor, before[name]) != (".lora_" in name), name
        assert tensor.dtype == (torch.float32 if ".lora_" in name else getattr(torch, dtype))
    layers = 2
    assert len(train_step.optimizer.state) == len(adapters_of(train_step.model)) == layers * 7 * 2


def test_policy_starts_as_the_base(world: World, make_lora: MakeConfig) -> None:
    config = make_lora()
    model, plain = (build_train_step(each, world).model for each in (config, make_lora(lora=None)))
    values = adapters_of(model)
    assert not any(tensor.any() for name, tensor in values.items() if "lora_B" in name)
    assert all(tensor.std() > 0.04 for name, tensor in values.items() if "lora_A" in name)
    again = adapters_of(build_train_step(config, world).model)
    assert all(torch.equal(tensor, values[name]) for name, tensor in again.items())
    assert torch.equal(logits(model), logits(plain))


def test_reference_is_the_policy_without_adapters(world: World, make_lora: MakeConfig, groups: Path) -> None:
    kl = {"coefficient": 0.3, "place": "reward", "estimator": "k1"}
    own = build_train_step(make_lora(kl=kl), world)
    other = build_train_step(make_lora(kl=kl | {"reference": str(make_lora().model.path)}), world)
    assert own.reference is own.model and other.reference is not other.model
    assert train(own, groups, [0, 1, 2]) == train(other, groups, [0, 1, 2])
    with without_adapters(own.model):
        assert torch.equal(logits(own.model), logits(other.reference))
    assert not torch.allclose(logits(own.model), logits(other.reference), atol=1e-3)


def test_restored_adapters_continue_bit_for_bit(
    world: World, make_lora: MakeConfig, groups: Path, trained: TrainStep, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "saved", trained.trained, TrainState(step=2), world, keep=1)
    wanted = train(trained, groups, [2, 3])
    restored = build_train_step(make_lora(), world)
    assert load_checkpoint(tmp_path / "saved", restored.trained, world, TrainState) == TrainState(step=2)
    assert train(restored, groups, [2, 3]) == wanted
    for lora in (LORA | {"rank": 8}, None):
        with pytest.raises(CheckpointError, match=r"model\.lora"):
            load_checkpoint(
                tmp_path / "saved", build_train_step(make_lora(lora=lora), world).trained, world, TrainState
            )


def test_checkpoint_of_tied_model_has_adapters_alone(world: World, tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=10_000, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    add_adapters(model, model.model, LoraConfig(rank=1), dtype=torch.float32)
    init_adapters(model)
    optimizer = build_optimizer(model, OptimizerConfig())
    save_checkpoint(tmp_path, {"policy": (model, optimizer)}, TrainState(step=1), world, keep=1)
    size = sum(file.stat().st_size for file in (tmp_path / "step-000001").iterdir())
    assert size < 200_000 < 4 * 10_000 * 32
    kept = adapters_of(model)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    assert load_checkpoint(tmp_path, {"policy": (model, optimizer)}, world, TrainState) == TrainState(step=1)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in adapters_of(model).items())


def test_merged_export_computes_as_the_policy(
    world: World, trained: TrainStep, make_lora: MakeConfig, tmp_path: Path
) -> None:
    source: Any = make_lora().model.path
    export_model(source, tmp_path / "merged", trained.model, world, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    torch.testing.assert_close(logits(merged), logits(trained.model), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits(merged), logits(initial(make_lora())), atol=1e-2)


def test_exported_adapter_is_one_of_peft(
    world: World, trained: TrainStep, make_lora: MakeConfig, tmp_path: Path
) -> None:
    base = initial(make_lora())
    source: Any = make_lora().model.path
    export_model(source, tmp_path / "adapter", trained.model, world, dtype=torch.float32, adapter=True)
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(trained.model), atol=1e-4, rtol=1e-4)
    for name, weights in loaded.merge_and_unload().named_parameters():
        torch.testing.assert_close(
            dict(merged_weights(trained.model, dtype=torch.float32))[name], weights.data, atol=1e-6, rtol=0
        )


def test_snapshot_has_the_adapters_and_their_config(trained: TrainStep) -> None:
    taker = SnapshotTaker(trained.model, dtype=torch.bfloat16, bucket_bytes=1 << 20, device=torch.device("cpu"))
    snapshot = taker.take(3, evaluate=False, keep=True)
    assert snapshot is not None and snapshot.manifest.adapter is not None
    config: Any = peft.get_peft_config(snapshot.manifest.adapter)
    assert (config.r, config.lora_alpha, config.target_modules) == (
        4, 16, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    )  # fmt: skip
    found = dict(snapshot.named_tensors())
    wanted = adapters_of(trained.model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name].bfloat16()) for name, tensor in found.items())


def test_chosen_layers_have_adapters(world: World, make_lora: MakeConfig) -> None:
    model = build_train_step(make_lora(LORA | {"targets": ["q_proj", "down_proj"]}), world).model
    assert {name.split(".")[-3] for name in adapters_of(model)} == {"q_proj", "down_proj"}
    with pytest.raises(ConfigError, match=r"model\.lora\.targets: .* qq_proj; .*v_proj"):
        build_train_step(make_lora(LORA | {"targets": ["q_proj", "qq_proj"]}), world)


def test_missing_package_is_named(world: World, make_lora: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"slipstream\[lora\]"):
        build_train_step(make_lora(), world)


@pytest.mark.parametrize(
    "lora",
    [
        {"modules_to_save": ["lm_head"]}, {"bias": "all"}, {"use_dora": True}, {"targets": ["lm_head"]},
        {"targets": ["q_proj", "embed_tokens"]}, {"targets": []}, {"rank": 0}, {"rank": 1000},
    ],
)  # fmt: skip
def test_adapters_that_engines_lack_are_refused(make_lora: MakeConfig, lora: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(lora))):
        make_lora(lora)
