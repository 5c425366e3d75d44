"""The check that packed sequences do not influence each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma3Config,
    GPT2Config,
    MiniMaxConfig,
    Qwen2MoeConfig,
    StableLmConfig,
)

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.data.prefix_tree import PrefixTree
from slipstream.learner.models import attention
from slipstream.learner.models.attention_tree import tree_attention
from slipstream.learner.models.load import load_model
from slipstream.learner.models.moe import routers
from slipstream.learner.models.prefix_sharing import common_sharing
from slipstream.learner.parallel.mesh import World
from tests.contract.families import write_family
from tests.learner.recorded import options_of, run_config

MakeConfig = Callable[..., RunConfig]
SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
WIDE = 4096
WINDOWED = Qwen2MoeConfig(**SMALL, **EXPERTS, use_sliding_window=True, sliding_window=WIDE, max_window_layers=1)
RECURRENT = MiniMaxConfig(**SMALL, head_dim=16, num_local_experts=2, layer_types=["linear_attention", "full_attention"])


def saved(config: Any, folder: Path) -> RunConfig:
    """A run on a model of this kind, with weights large enough that its outputs depend on all inputs."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "model")
    return run_config(folder / "model", folder)


def load(config: RunConfig, world: World, dtype: str = "float32") -> Any:
    assert config.model.path is not None
    model = config.model.model_copy(update={"dtype": dtype})
    return load_model(config.model.path, options_of(config.model_copy(update={"model": model})), world)


def test_layers_with_a_state_across_sequences_are_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^MiniMaxModel .*packed") as refusal:
        load(saved(RECURRENT, tmp_path), world)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=2), "GPT2LMHeadModel .*`layers`"),
        (FalconConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2), "KeyError"),
        (StableLmConfig(**SMALL), "StableLmModel .*TypeError: .*'segment_lengths'"),
    ],
    ids=["other-layers", "other-attention", "lengths-not-handed-on"],
)
def test_unsupported_model_is_refused_in_one_line(kind: Any, problem: str, world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem) as refusal:
        load(saved(kind, tmp_path), world)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_that_ignores_a_wide_window_is_refused(
    dtype: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = saved(WINDOWED, tmp_path)
    layer = load(config, world, dtype).model.layers[1].self_attn
    assert layer.config.sliding_window == WIDE
    monkeypatch.setattr(attention, "segments_mask", lambda **_: None)
    with pytest.raises(ConfigError, match=r"Qwen2MoeModel .*packed"):
        load(config, world, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_whose_attention_is_off_shares_no_prefixes(
    dtype: str, world: World, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert common_sharing([load(make_config(), world, dtype)]) is not None
    exact = tree_attention

    def without_ancestors(query: Any, key: Any, value: Any, tree: PrefixTree, scaling: float) -> Any:
        return exact(query, key, value, PrefixTree.of_sequences(tree.lengths), scaling)

    monkeypatch.setattr(attention, "tree_attention", without_ancestors)
    assert common_sharing([load(make_config(), world, dtype)]) is None


@pytest.mark.parametrize(("family", "seed"), [("gpt-oss", 12), ("DeepSeek-V3", 18)])
def test_experts_that_rounding_changes_are_no_deviation(family: str, seed: int, world: World, tmp_path: Path) -> None:
    write_family(tmp_path / "model", family, seed=seed)  # whose packed states, with their own experts, are off by > 3 %
    model = load(run_config(tmp_path / "model", tmp_path), world, "bfloat16")
    for router in routers(model):
        routing: Any = router.routing
        assert not routing.replays
        assert routing.record is None


def test_text_of_multimodal_model_passes(world: World, tmp_path: Path) -> None:
    text = {**SMALL, "head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"image_size": 16, "patch_size": 8}
    kind = Gemma3Config(text_config=text, vision_config={**vision, **sizes}, mm_tokens_per_image=4)
    assert load(saved(kind, tmp_path), world).model.language_model.layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_check_restores_model_and_random_state(world: World, make_config: MakeConfig, dtype: str) -> None:
    random_before = torch.get_rng_state()
    model = load(make_config(), world, dtype)
    assert torch.equal(torch.get_rng_state(), random_before)
    assert model.config._attn_implementation == make_config().learner.attention
    for name, parameter in model.named_parameters():  # what an optimizer gets
        assert isinstance(parameter, DTensor) == (dtype != "float32"), name  # a single fp32 rank has no shards
        assert parameter.dtype == torch.float32, name
