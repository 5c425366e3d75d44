"""Models that judge the policy's answers: they must mean the same by a token."""

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
from tests.learner.recorded import build_trainer

MakeConfig = Callable[..., RunConfig]


def resized(model: Path, folder: Path, *, vocabulary: int) -> Path:
    """The model with so many rows in its tables of tokens; those that it did not have are 0."""
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
    """The model, of whose tokens the last two have changed places."""
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    vocabulary: dict[str, int] = described["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(described))
    return folder


def judges(path: Path) -> list[dict[str, Any]]:
    """Settings by which the model in `path` is the reference, and the critic."""
    return [{"kl": {"coefficient": 0.1, "reference": path}}, {"advantage": "gae", "critic": {"path": path}}]


@pytest.mark.parametrize("judge", [0, 1], ids=["reference", "critic"])
def test_a_model_without_all_tokens_is_refused(
    judge: int, world: World, make_config: MakeConfig, digits_model: Path, tmp_path: Path
) -> None:
    path = resized(digits_model, tmp_path / "smaller", vocabulary=8)
    with pytest.raises(ConfigError, match=rf"={path}: it knows 8 tokens, the policy's tokenizer has \d\d; choose"):
        build_trainer(make_config(**judges(path)[judge]), world)


@pytest.mark.parametrize("judge", [0, 1], ids=["reference", "critic"])
def test_a_model_with_another_tokenizer_is_refused(
    judge: int, world: World, make_config: MakeConfig, digits_model: Path, tmp_path: Path
) -> None:
    path = renumbered(Path(shutil.copytree(digits_model, tmp_path / "other")))
    with pytest.raises(ConfigError, match=rf"={path}: the token '.+' is its number \d+, and the policy's number \d+;"):
        build_trainer(make_config(**judges(path)[judge]), world)


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize("judge", [0, 1], ids=["reference", "critic"])
def test_another_padding_of_the_vocabulary_is_accepted(
    judge: int, tokenizer: bool, world: World, make_config: MakeConfig, digits_model: Path, tmp_path: Path
) -> None:
    path = resized(digits_model, tmp_path / "larger", vocabulary=64)
    if not tokenizer:
        (path / "tokenizer.json").unlink()
    build_trainer(make_config(**judges(path)[judge]), world)


def test_an_unreadable_tokenizer_is_named(
    world: World, make_config: MakeConfig, digits_model: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(digits_model, tmp_path / "other"))
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json can't be"):
        build_trainer(make_config(**judges(path)[0]), world)
