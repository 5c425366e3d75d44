"""Comparison of the tokenizers of models."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.parallel.mesh import World
from tests.learner.recorded import build_train_step

MakeConfig = Callable[..., RunConfig]


def resized(model: Path, folder: Path, *, vocabulary: int) -> Path:
    """The model with that many token embeddings; added ones are 0."""
    shutil.copytree(model, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": vocabulary}))
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = tensors[name]
        tensors[name] = torch.cat([old, old.new_zeros(64, old.shape[1])])[:vocabulary].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def renumbered(folder: Path) -> Path:
    """The model with its last two tokens exchanged."""
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    vocabulary: dict[str, int] = described["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(described))
    return folder


def roles(path: Path) -> list[dict[str, Any]]:
    """Settings in which the model in `path` is the reference, and the critic."""
    return [{"kl": {"coefficient": 0.1, "reference": path}}, {"advantage": "gae", "critic": {"path": path}}]


@pytest.mark.parametrize("role", [0, 1], ids=["reference", "critic"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda model, folder: resized(model, folder, vocabulary=8), r"8 tokens, .* \d\d;"),
        (lambda model, folder: renumbered(shutil.copytree(model, folder)), r"'.+' has id \d+, and \d+ "),
    ],
    ids=["smaller vocabulary", "other ids"],
)
def test_other_tokens_are_refused(
    role: int, change: Callable[[Path, Path], Path], problem: str, world: World, make_config: MakeConfig,
    digits_model: Path, tmp_path: Path,
) -> None:  # fmt: skip
    path = change(digits_model, tmp_path / "other")
    with pytest.raises(ConfigError, match=f"={path}: .*{problem}"):
        build_train_step(make_config(**roles(path)[role]), world)


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize("role", [0, 1], ids=["reference", "critic"])
def test_other_padding_of_vocabulary_is_accepted(
    role: int, tokenizer: bool, world: World, make_config: MakeConfig, digits_model: Path, tmp_path: Path
) -> None:
    path = resized(digits_model, tmp_path / "larger", vocabulary=64)
    if not tokenizer:
        (path / "tokenizer.json").unlink()
    build_train_step(make_config(**roles(path)[role]), world)


def test_unreadable_tokenizer_is_named(
    world: World, make_config: MakeConfig, digits_model: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(digits_model, tmp_path / "other"))
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json can't be"):
        build_train_step(make_config(**roles(path)[0]), world)
