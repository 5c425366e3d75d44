"""Weights from a model's files: formats, names and shapes that differ in memory, files that do not fit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.model import LoraConfig
from slipstream.learner.models.load import ModelOptions, check_model, load_model
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from tests.contract.experts import MODELS as EXPERTS
from tests.contract.experts import write_experts

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


def write_images(folder: Path) -> None:
    """A model of text and images, whose rotary embedding has buffers for each kind of layer."""
    text = {**SMALL, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"image_size": 16, "patch_size": 8}
    build: Any = Gemma3ForConditionalGeneration
    build(Gemma3Config(text_config=text, vision_config={**vision, **sizes}, mm_tokens_per_image=4)).save_pretrained(
        folder
    )


def write_dense(folder: Path, *, tied: bool = True, **saving: Any) -> None:
    """A dense model."""
    build: Any = Qwen3ForCausalLM
    build(Qwen3Config(**SMALL, tie_word_embeddings=tied)).save_pretrained(folder, **saving)


def write_pickled(folder: Path) -> None:
    """A dense model, its weights stored as torch does."""
    write_dense(folder)
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()


def write_bfloat16(folder: Path) -> None:
    write_dense(folder)
    file = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


KINDS: dict[str, Callable[[Path], None]] = {
    "tied": write_dense, "untied": lambda folder: write_dense(folder, tied=False),
    "several-files": lambda folder: write_dense(folder, max_shard_size="20KB"), "pickled": write_pickled,
    "bfloat16": write_bfloat16, "images": write_images,
    **{kind: lambda folder, kind=kind: write_experts(folder, kind) for kind in EXPERTS},  # type: ignore[misc]
}  # fmt: skip


OPTIONS = ModelOptions(dtype=torch.float32, attention="segments")


def load(folder: Path, world: World, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(folder, ModelOptions(dtype=dtype, attention="segments"), world)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_model_equals_that_of_transformers(kind: str, dtype: torch.dtype, world: World, tmp_path: Path) -> None:
    KINDS[kind](tmp_path)
    check_model(tmp_path, OPTIONS)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = load(tmp_path, world, dtype)
    weights, buffers = dict(full_weights(model)), dict(model.named_buffers())
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    of_reference = (dict(reference.named_parameters()), dict(reference.named_buffers()))
    for found, wanted in zip((weights, buffers), of_reference, strict=True):
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name


def drop(folder: Path) -> None:
    """Removes a tensor from the file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def widen(folder: Path) -> None:
    """Changes a size in the configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 48}))


def cut(folder: Path) -> None:
    """Cuts the file off, as a download that was interrupted."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_part(folder: Path) -> None:
    """Removes the second part of the weights."""
    (part,) = folder.glob("model-00002-*.safetensors")
    part.unlink()


def quantize(folder: Path) -> None:
    """Describes the weights as quantized."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (drop, r"layers\.1\.mlp\.up_proj\.weight"), (widen, r"mlp\.\S+ .*\[32, 32\].*48"), (quantize, "quantized"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors"),
        (cut, r"model\.safetensors is damaged"), (lose_part, r"00002-of-\d+\.safetensors is missing"),
    ],
    ids=["tensor-missing", "other-shape", "quantized", "no-file", "cut-file", "no-part"],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused(
    damage: Callable[[Path], None], problem: str, world: World, tmp_path: Path
) -> None:
    write_dense(tmp_path, max_shard_size="20KB" if damage is lose_part else "1GB")
    damage(tmp_path)
    for attempt in (lambda: load(tmp_path, world), lambda: check_model(tmp_path, OPTIONS)):
        with pytest.raises(ConfigError, match=problem) as refusal:
            attempt()
        assert str(tmp_path) in str(refusal.value)


def test_targets_of_adapters_are_compared_with_the_layers(tmp_path: Path) -> None:
    write_dense(tmp_path)
    check_model(tmp_path, replace(OPTIONS, lora=LoraConfig(targets=("q_proj",))))
    with pytest.raises(ConfigError, match=r"model\.lora\.targets.* c_attn.*q_proj"):
        check_model(tmp_path, replace(OPTIONS, lora=LoraConfig(targets=("c_attn", "q_proj"))))
