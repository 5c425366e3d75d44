"""The exported model: a folder that transformers loads."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from slipstream.configs import RunConfig
from slipstream.learner.checkpoint import CheckpointError
from slipstream.learner.export import export_model
from slipstream.learner.models.load import load_model
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from slipstream.models.digits import build_digits_model
from tests.full_disk import files_of_at_most
from tests.learner.recorded import VOCABULARY, build_train_step, options_of, record, run_config, train

MakeConfig = Callable[..., RunConfig]
TOKENS = torch.tensor([[3, 17, 4, 9, 9, 30]])
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture
def source(digits_model: Path, tmp_path: Path) -> Path:
    """A copy of the model's folder."""
    return shutil.copytree(digits_model, tmp_path / "source")


def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


def test_export_has_trained_model_and_tokenizer(
    world: World, digits_model: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config()
    record(tmp_path / "groups", 1, config)
    train_step = build_train_step(config, world)
    train(train_step, tmp_path / "groups", [0])
    export_model(digits_model, tmp_path / "exported", train_step.model, world, dtype=torch.float32)
    exported, initial = (
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        for path in (tmp_path / "exported", digits_model)
    )
    plain = AutoModelForCausalLM.from_pretrained(digits_model, attn_implementation="eager")
    plain.load_state_dict(dict(full_weights(train_step.model)))
    assert torch.equal(logits(exported), logits(plain))
    assert not torch.allclose(logits(exported), logits(initial), atol=1e-3)
    assert exported.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.encode("123r") == AutoTokenizer.from_pretrained(digits_model).encode("123r")
    assert tokenizer.decode(tokenizer.encode("123r")) == "123r"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_exported_weights_have_the_default_file_mode(
    world: World, digits_model: Path, make_config: MakeConfig, tmp_path: Path, umask: int, mode: int
) -> None:
    config = make_config()
    model = build_train_step(config, world).model
    before = os.umask(umask)
    try:
        export_model(digits_model, tmp_path / "exported", model, world, dtype=torch.float32)
    finally:
        os.umask(before)
    written = {file: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "exported").glob("*.safetensors")}
    assert written == {tmp_path / "exported" / "model.safetensors": mode}
    assert not list((tmp_path / "exported").glob(".*"))


def test_export_without_room_is_refused_with_its_folder(
    world: World, digits_model: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config()
    model, exported = build_train_step(config, world).model, tmp_path / "exported"
    for room_bytes in (10, 10_000):
        with files_of_at_most(room_bytes), pytest.raises(CheckpointError, match=str(exported)):
            export_model(digits_model, exported, model, world, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_embeddings_are_exported_once_and_cast(world: World, tmp_path: Path, dtype: torch.dtype) -> None:
    source = tmp_path / "source"
    build_digits_model(tmp_path / "tokenizer", seed=0)
    build: Any = Qwen3ForCausalLM  # its constructor has no types
    build(Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)).save_pretrained(source)
    AutoTokenizer.from_pretrained(tmp_path / "tokenizer").save_pretrained(source)
    train_step = build_train_step(run_config(source, tmp_path), world)
    export_model(source, tmp_path / "exported", train_step.model, world, dtype=dtype)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    original = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    assert exported.dtype == dtype
    assert "lm_head.weight" not in load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    assert torch.equal(logits(exported), logits(original))


def test_saved_buffers_are_exported_unchanged(world: World, tmp_path: Path) -> None:
    build: Any = Glm4MoeForCausalLM
    model = build(
        Glm4MoeConfig(
            **SMALL, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=0
        )
    )
    bias = torch.tensor([5.0, 0.001, 0.0, -5.0])
    model.model.layers[0].mlp.gate.e_score_correction_bias.copy_(bias)
    model.save_pretrained(tmp_path / "source")
    export_model(tmp_path / "source", tmp_path / "exported", model, world, dtype=torch.bfloat16)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert torch.equal(exported.model.layers[0].mlp.gate.e_score_correction_bias, bias)


def test_large_models_are_exported_to_several_files(
    world: World, source: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.learner.export.EXPORTED_BYTES", 50_000)
    target = tmp_path / "exported"
    target.mkdir()
    (target / "model.safetensors").touch()  # of an earlier export
    export_model(source, target, load_model(source, options_of(make_config()), world), world, dtype=torch.float32)
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 60_000 for file in files)
    assert (target / "model.safetensors.index.json").exists() and "model.safetensors" not in [f.name for f in files]
    exported, initial = (AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (target, source))
    assert torch.equal(logits(exported), logits(initial))


INITIAL_WEIGHTS = (
    "original/consolidated.00.pth", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack",
    "onnx/model.onnx_data", ".git/lfs/objects/0a",
)  # fmt: skip


def test_initial_weights_of_any_format_are_not_exported(
    world: World, source: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    for initial in INITIAL_WEIGHTS:
        (source / initial).parent.mkdir(parents=True, exist_ok=True)
        (source / initial).write_text("not trained")
    model = load_model(source, options_of(make_config()), world)
    export_model(source, tmp_path / "exported", model, world, dtype=torch.float32)
    exported = {path.name for path in (tmp_path / "exported").rglob("*") if path.is_file()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} < exported
    assert not exported & {Path(initial).name for initial in INITIAL_WEIGHTS}


def test_export_inside_models_folder_omits_runs(world: World, source: Path, make_config: MakeConfig) -> None:
    (source / "templates").mkdir()
    (source / "templates" / "chat.jinja").write_text("template")
    target = source / "runs" / "mine" / "model"
    target.parent.mkdir(parents=True)
    (target.parent / "metrics.jsonl").write_text("{}")
    export_model(source, target, load_model(source, options_of(make_config()), world), world, dtype=torch.float32)
    assert (target / "templates" / "chat.jinja").exists()
    assert not (target / "runs").exists()
    AutoModelForCausalLM.from_pretrained(target)
