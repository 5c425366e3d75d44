"""Fingerprints of models, and the comparison of their tokenizers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.configs import RunConfig
from slipstream.configs.digits_model import build_digits_model
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.models.identity import SAMPLE_BYTES, SAMPLES, model_fingerprint
from slipstream.learner.parallel.mesh import World
from tests.learner.recorded import build_trainer

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
    role: int,
    change: Callable[[Path, Path], Path],
    problem: str,
    world: World,
    make_config: MakeConfig,
    digits_model: Path,
    tmp_path: Path,
) -> None:
    path = change(digits_model, tmp_path / "other")
    with pytest.raises(ConfigError, match=f"={path}: .*{problem}"):
        build_trainer(make_config(**roles(path)[role]), world)


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize("role", [0, 1], ids=["reference", "critic"])
def test_other_padding_of_vocabulary_is_accepted(
    role: int, tokenizer: bool, world: World, make_config: MakeConfig, digits_model: Path, tmp_path: Path
) -> None:
    path = resized(digits_model, tmp_path / "larger", vocabulary=64)
    if not tokenizer:
        (path / "tokenizer.json").unlink()
    build_trainer(make_config(**roles(path)[role]), world)


def test_unreadable_tokenizer_is_named(
    world: World, make_config: MakeConfig, digits_model: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(digits_model, tmp_path / "other"))
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json can't be"):
        build_trainer(make_config(**roles(path)[0]), world)


def change_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"!")


@pytest.fixture
def built(tmp_path: Path) -> Path:
    build_digits_model(tmp_path / "built", seed=0)
    return tmp_path / "built"


def test_fingerprint_is_independent_of_folder(built: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "copy"
    shutil.copytree(built, elsewhere)
    (elsewhere / "README.md").touch()
    (elsewhere / "generation_config.json").unlink()
    assert model_fingerprint(elsewhere) == model_fingerprint(built)


def test_rebuilt_model_has_same_fingerprint(built: Path, tmp_path: Path) -> None:
    build_digits_model(tmp_path / "again", seed=0)
    assert model_fingerprint(tmp_path / "again") == model_fingerprint(built)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: change_a_byte(folder / "config.json"),
        lambda folder: change_a_byte(folder / "model.safetensors"),
        lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
        lambda folder: shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors"),
    ],
    ids=["another configuration", "another weight", "another name", "one file more"],
)
def test_config_and_weights_change_fingerprint(built: Path, change: Callable[[Path], object]) -> None:
    before = model_fingerprint(built)
    change(built)
    assert model_fingerprint(built) != before


def test_large_files_are_sampled_from_start_to_end(built: Path) -> None:
    weights = built / "model.safetensors"
    size = 20 * SAMPLES * SAMPLE_BYTES
    found = set()
    for changed in (None, 0, size // 2, size - size // SAMPLES):
        with weights.open("wb") as file:
            file.truncate(size)
            if changed is not None:
                file.seek(changed)
                file.write(b"!")
        found.add(model_fingerprint(built))
    assert len(found) == 4
    assert weights.stat().st_size == size


def test_weights_in_bin_format_are_fallback(built: Path) -> None:
    with_both = model_fingerprint(built)
    (built / "pytorch_model.bin").write_bytes(b"older")
    assert model_fingerprint(built) == with_both
    (built / "model.safetensors").unlink()
    only = model_fingerprint(built)
    change_a_byte(built / "pytorch_model.bin")
    assert len({with_both, only, model_fingerprint(built)}) == 3
