"""The tiny model: a folder that transformers loads, the same bytes for the same seed."""

import json
import string
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.models import tiny
from slipstream.models.digits import TOKENS, build_digits_model
from slipstream.models.tiny import CALLS, TEXT, build_model


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "initial_model"
    build_digits_model(path, seed=0)
    return path


def test_transformers_loads_all_weights(folder: Path) -> None:
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


def test_tokenizer_has_one_token_per_character(folder: Path) -> None:
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


def test_calls_model_calls_a_tool_in_three_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    build_model(tmp_path / "model", CALLS, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": "7"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "7="},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    written = '<tool_call>{"name": "lookup", "arguments": {"key": "7"}}</tool_call>'
    assert text == f"7={written}<eos>4="
    assert len(tokenizer(text).input_ids) == len("7=") + 3 + len("e4=")


def test_text_model_has_printable_ascii_and_a_chat_template(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    build_model(tmp_path / "model", TEXT, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = string.printable[:-5] + "\n"  # without other white space
    ids = tokenizer(text).input_ids
    assert (len(ids), tokenizer.decode(ids)) == (len(text), text)
    assert (tokenizer.eos_token, tokenizer.bos_token_id) == ("<|im_end|>", None)
    messages = [{"role": "user", "content": "1+1?"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id in tokenizer(chat).input_ids
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    dialogue: Any = [{"role": "system", "content": "Hi"}, *messages, {"role": "assistant", "tool_calls": [call]}]
    chat = tokenizer.apply_chat_template(dialogue, tools=[{"name": "add"}], tokenize=False)
    assert isinstance(chat, str)
    assert chat.count("system") == 1
    assert 'Hi\n<tools>\n{"name": "add"}\n</tools>' in chat
    assert chat.endswith('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n')
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    model, report = loaded
    assert not any(report.values()), report
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (len(tokenizer), 64)


def test_seed_determines_the_weights(folder: Path, tmp_path: Path) -> None:
    build_digits_model(tmp_path / "same", seed=0)
    build_digits_model(tmp_path / "other", seed=1)
    assert contents(tmp_path / "same") == contents(folder)
    changed = {name for name, data in contents(tmp_path / "other").items() if data != contents(folder)[name]}
    assert changed == {"model.safetensors", "built_by_slipstream.json"}


def test_folder_of_another_seed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model"
    build_digits_model(path, seed=0)
    inode = path.stat().st_ino
    build_digits_model(path, seed=0)
    assert path.stat().st_ino == inode
    build_digits_model(path, seed=1)
    assert json.loads((path / "built_by_slipstream.json").read_text())["seed"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["model"], "no scratch folder is left"


@pytest.mark.parametrize("record", [None, "", '{"model": "dig'], ids=["foreign", "empty", "cut off"])
def test_folder_that_was_not_built_here_is_not_touched(tmp_path: Path, record: str | None) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    if record is not None:  # as a power failure leaves it
        (tmp_path / "built_by_slipstream.json").write_text(record)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} .*model.path"):
        build_digits_model(tmp_path, seed=0)
    assert contents(tmp_path) == before


def test_model_built_meanwhile_by_another_process_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "initial_model"
    write = tiny._write

    def write_late(new: Path, kind: Any, record: dict[str, Any]) -> None:
        monkeypatch.setattr(tiny, "_write", write)
        build_digits_model(folder, seed=record["seed"])
        (folder / "reader").touch()
        write(new, kind, record)

    monkeypatch.setattr(tiny, "_write", write_late)
    build_digits_model(folder, seed=0)
    assert (folder / "reader").exists()
