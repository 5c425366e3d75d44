"""The tiny model: a folder that transformers loads, the same bytes for the same seed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import digits_model
from slipstream.configs.digits_model import TOKENS, build_digits_model
from slipstream.configs.runtime.errors import ConfigError


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "initial_model"
    build_digits_model(path, seed=0)
    return path


def test_transformers_loads_the_model_with_no_weight_missing_or_left_over(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = loaded
    assert not any(report.values()), report
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    embedding = model.model.embed_tokens.weight
    assert embedding.shape == (32, 64)
    assert 0.018 < embedding.std() < 0.022
    logits_BTV = model(torch.tensor([[3, 4, 5, 13]])).logits
    assert logits_BTV.shape == (1, 4, 32)
    assert torch.isfinite(logits_BTV).all()


def test_the_tokenizer_makes_one_token_of_each_character_and_back(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("123r", "0c", "987s", "12+34=", "046"):
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert tokenizer.decode([5, 4, 3, 1], skip_special_tokens=True) == "321"
    assert len(tokenizer) == len(TOKENS) == 32
    assert all(len(tokenizer.decode([token])) == 1 for token in range(2, 32)), "no id vanishes from an answer"
    with pytest.raises(Exception, match="UNK"):  # tokenizers raises nothing narrower
        tokenizer("12x")


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(folder: Path, tmp_path: Path) -> None:
    build_digits_model(tmp_path / "same", seed=0)
    build_digits_model(tmp_path / "other", seed=1)
    assert contents(tmp_path / "same") == contents(folder)
    changed = {name for name, data in contents(tmp_path / "other").items() if data != contents(folder)[name]}
    assert changed == {"model.safetensors", "built_by_slipstream.json"}


def test_a_folder_that_stands_is_left_alone_and_one_of_another_seed_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model"
    build_digits_model(path, seed=0)
    inode = path.stat().st_ino
    build_digits_model(path, seed=0)
    assert path.stat().st_ino == inode
    build_digits_model(path, seed=1)
    assert json.loads((path / "built_by_slipstream.json").read_text())["seed"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["model"], "no scratch folder is left"


def test_a_folder_that_holds_something_else_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="slipstream did not build"):
        build_digits_model(tmp_path, seed=0)
    assert contents(tmp_path) == {"thesis.tex": b"mine"}


@pytest.mark.parametrize("half", ["", '{"model": "dig'])
def test_a_model_of_which_a_power_failure_left_half_is_named(tmp_path: Path, half: str) -> None:
    build_digits_model(tmp_path / "model", seed=0)
    (tmp_path / "model" / "built_by_slipstream.json").write_text(half)
    with pytest.raises(ConfigError, match="model holds something that slipstream did not build: remove it"):
        build_digits_model(tmp_path / "model", seed=0)


def test_building_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from slipstream.configs.digits_model import build_digits_model; "
        f"build_digits_model(Path({str(tmp_path / 'model')!r}), seed=0); "
        "sys.exit(' '.join({'torch', 'transformers', 'vllm'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, ""), "sys.exit('') prints nothing"


def test_a_model_that_another_process_has_built_meanwhile_stays_for_who_is_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "initial_model"
    write = digits_model._write

    def write_late(new: Path, record: dict[str, Any], seed: int) -> None:
        monkeypatch.setattr(digits_model, "_write", write)
        build_digits_model(folder, seed=seed)
        (folder / "reader").touch()
        write(new, record, seed)

    monkeypatch.setattr(digits_model, "_write", write_late)
    build_digits_model(folder, seed=0)
    assert (folder / "reader").exists()
