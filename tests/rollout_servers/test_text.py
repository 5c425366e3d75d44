"""Text to token ids and back."""

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer

from slipstream.configs.digits_model import EOS, PAD, TOKENS
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.tokenizer import PromptError, Text
from tests.remote_code import with_remote_code

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


def changed(model: Path, folder: Path, name: str, **values: Any) -> Path:
    """A copy of the model with other values in one of its JSON files."""
    copy = folder / "copy"
    shutil.copytree(model, copy)
    path = copy / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return copy


def test_a_text_is_read_as_it_is_and_written_without_special_tokens(model: Path) -> None:
    text = Text(model)
    ids = text.encode("123r")
    assert ids == [TOKENS.index(token) for token in "123r"]
    pad, eos = TOKENS.index(PAD), TOKENS.index(EOS)
    assert text.decode([[*ids, eos], [pad, ids[0]], []]) == ["123r", "1", ""]


@pytest.mark.parametrize("how", ["enable_truncation", "enable_padding"])
def test_a_prompt_is_neither_cut_nor_filled_up_whatever_tokenizer_json_says(
    model: Path, tmp_path: Path, how: str
) -> None:
    copy = changed(model, tmp_path, "config.json")
    file = str(copy / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    getattr(tokenizer, how)(**{"enable_truncation": {"max_length": 2}, "enable_padding": {"length": 9}}[how])
    tokenizer.save(file)
    assert Text(copy).encode("123r") == Text(model).encode("123r")


def test_a_text_has_the_tokenizers_bos_in_front_once(model: Path, tmp_path: Path) -> None:
    copy = changed(model, tmp_path, "tokenizer_config.json", bos_token=PAD)
    file = str(copy / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    bos = TOKENS.index(PAD)
    tokenizer.post_processor = TemplateProcessing(single=f"{PAD} $A", special_tokens=[(PAD, bos)])
    tokenizer.save(file)
    text = Text(copy)
    assert text.encode("12r") == text.encode(f"{PAD}12r") == [bos, *Text(model).encode("12r")]


def test_chat_messages_go_through_the_models_chat_template(model: Path, tmp_path: Path) -> None:
    text = Text(changed(model, tmp_path, "tokenizer_config.json", chat_template=TEMPLATE))
    messages = ({"role": "user", "content": "12"}, {"role": "assistant", "content": "3r"})
    assert text.encode(messages) == text.encode("123r=")


@pytest.mark.parametrize("prompt", ["12x", "é", [{"role": "user", "content": "1"}]], ids=["x", "é", "no-template"])
def test_a_prompt_that_can_not_be_tokenized_is_an_error_of_its_own_kind(model: Path, prompt: Any) -> None:
    with pytest.raises(PromptError):
        Text(model).encode(prompt)


def test_an_answer_ends_with_the_tokenizers_eos_or_any_of_the_generation_config(model: Path, tmp_path: Path) -> None:
    eos = TOKENS.index(EOS)
    assert Text(model).eos_token_ids == (eos,)
    copy = changed(model, tmp_path, "generation_config.json", eos_token_id=[9, 5])
    assert Text(copy).eos_token_ids == (eos, 5, 9)
    (copy / "generation_config.json").unlink()
    assert Text(copy).eos_token_ids == (eos,)


def test_a_token_that_the_model_does_not_have_ends_no_answer_and_is_named(model: Path, tmp_path: Path) -> None:
    eos, vocabulary = TOKENS.index(EOS), len(TOKENS)
    copy = changed(model, tmp_path, "generation_config.json", eos_token_id=[vocabulary, vocabulary - 1])
    with capture_logs() as logs:
        assert Text(copy).eos_token_ids == (eos, vocabulary - 1)
    assert [(line["log_level"], line["left_out"]) for line in logs] == [("warning", [vocabulary])]


@pytest.mark.parametrize("listed", [9, [9]])
def test_without_a_generation_config_an_answer_ends_as_the_models_configuration_says(
    model: Path, tmp_path: Path, listed: int | list[int]
) -> None:
    copy = changed(model, tmp_path, "config.json", eos_token_id=listed)
    (copy / "generation_config.json").unlink()
    assert Text(copy).eos_token_ids == (TOKENS.index(EOS), 9)


def test_fingerprints_are_equal_until_a_text_or_a_chat_would_be_read_differently(model: Path, tmp_path: Path) -> None:
    assert Text(model).fingerprint() == Text(model).fingerprint()
    (tmp_path / "chat").mkdir()
    chatty = changed(model, tmp_path / "chat", "tokenizer_config.json", chat_template=TEMPLATE)
    other = changed(model, tmp_path, "tokenizer.json", pre_tokenizer=None)
    assert len({Text(each).fingerprint() for each in (model, chatty, other)}) == 3


def test_a_model_without_a_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    shutil.copy(model / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"has no tokenizer.*tokenizer\.json"):
        Text(tmp_path)


def test_a_model_whose_tokenizer_has_no_tokenizer_json_is_refused_with_its_name(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"is a ByT5Tokenizer, which has no tokenizer\.json"):
        Text(tmp_path)


def test_mistrals_own_file_beside_tokenizer_json_changes_nothing(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("mistral_common")
    copy = changed(model, tmp_path, "config.json", model_type="mistral")
    (copy / "tekken.json").write_bytes((files("mistral_common") / "data" / "tekken_240911.json").read_bytes())
    assert Text(copy).encode("123r") == Text(model).encode("123r")


def test_a_tokenizer_that_needs_code_of_its_folder_is_refused_without_asking(model: Path, tmp_path: Path) -> None:
    copy = with_remote_code(model, tmp_path, model_type="acme", tokenizer=True)
    with pytest.raises(ConfigError, match="needs code from its folder, which slipstream does not run"):
        Text(copy)
