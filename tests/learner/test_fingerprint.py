"""By what a model is known again."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.configs.digits_model import build_digits_model
from slipstream.learner.models.identity import SAMPLE_BYTES, SAMPLES, model_fingerprint


def change_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"!")


@pytest.fixture
def built(tmp_path: Path) -> Path:
    build_digits_model(tmp_path / "built", seed=0)
    return tmp_path / "built"


def test_the_fingerprint_is_independent_of_the_folder(built: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "copy"
    shutil.copytree(built, elsewhere)
    (elsewhere / "README.md").touch()
    (elsewhere / "generation_config.json").unlink()
    assert model_fingerprint(elsewhere) == model_fingerprint(built)


def test_a_built_model_has_the_same_fingerprint_everywhere(built: Path, tmp_path: Path) -> None:
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
def test_config_and_weights_change_the_fingerprint(built: Path, change: Callable[[Path], object]) -> None:
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


def test_weights_in_bin_format_are_the_fallback(built: Path) -> None:
    with_both = model_fingerprint(built)
    (built / "pytorch_model.bin").write_bytes(b"older")
    assert model_fingerprint(built) == with_both
    (built / "model.safetensors").unlink()
    only = model_fingerprint(built)
    change_a_byte(built / "pytorch_model.bin")
    assert len({with_both, only, model_fingerprint(built)}) == 3
