"""Texts and chats to token ids and back."""

import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from structlog.testing import capture_logs
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer

from slipstream.configs.runtime.errors import ConfigError
from slipstream.models.digits import EOS, TOKENS, build_digits_model
from slipstream.models.tiny import PAD
from slipstream.models.tokenizer import PromptError, Tokenizer
from tests.remote_code import with_remote_code

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
VOCABULARY = len(TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the digits tokenizer; not to be written to."""
    folder = tmp_path_factory.mktemp("digits") / "model"
    build_digits_model(folder, seed=0)
    return folder


def changed(model: Path, folder: Path, name: str, **values: Any) -> Path:
    """A copy of the model with other values in one of its JSON files."""
    copy = folder / "copy"
    shutil.copytree(model, copy)
    path = copy / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return copy


def test_texts_are_encoded_and_decoded_without_special_tokens(model: Path) -> None:
    tokenizer = Tokenizer(model)
    ids = tokenizer.encode("123r")
    assert ids == [TOKENS.index(token) for token in "123r"]
    pad, eos = TOKENS.index(PAD), TOKENS.index(EOS)
    assert tokenizer.decode([[*ids, eos], [pad, ids[0]], []]) == ["123r", "1", ""]


def rewritten(folder: Path, rewrite: Callable[[tokenizers.Tokenizer], object]) -> Tokenizer:
    """The tokenizer of a folder whose tokenizer.json is changed."""
    file = str(folder / "tokenizer.json")
    rust = tokenizers.Tokenizer.from_file(file)
    rewrite(rust)
    rust.save(file)
    return Tokenizer(folder)


@pytest.mark.parametrize(
    "rewrite",
    [lambda rust: rust.enable_truncation(max_length=2), lambda rust: rust.enable_padding(length=9)],
    ids=["truncation", "padding"],
)
def test_truncation_and_padding_of_tokenizer_json_are_off(
    model: Path, tmp_path: Path, rewrite: Callable[[tokenizers.Tokenizer], object]
) -> None:
    tokenizer = rewritten(changed(model, tmp_path, "config.json"), rewrite)
    assert tokenizer.encode("123r") == Tokenizer(model).encode("123r")


def test_a_text_begins_with_one_bos_an_observation_with_none(model: Path, tmp_path: Path) -> None:
    bos, plain = TOKENS.index(PAD), Tokenizer(model).encode("12r")
    with_bos = TemplateProcessing(single=f"{PAD} $A", special_tokens=[(PAD, bos)])
    copy = changed(model, tmp_path, "tokenizer_config.json", bos_token=PAD)
    tokenizer = rewritten(copy, lambda rust: setattr(rust, "post_processor", with_bos))
    assert tokenizer.encode("12r") == tokenizer.encode(f"{PAD}12r") == [bos, *plain]
    assert tokenizer.encode_observation("12r") == plain


def test_damaged_tokenizer_is_named(model: Path, tmp_path: Path) -> None:
    copy = changed(model, tmp_path, "config.json")
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError) as error:
        Tokenizer(copy)
    assert str(copy) in str(error.value)


def test_chat_messages_use_the_chat_template(model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(changed(model, tmp_path, "tokenizer_config.json", chat_template=TEMPLATE))
    messages = ({"role": "user", "content": "12"}, {"role": "assistant", "content": "3r"})
    assert tokenizer.encode(messages) == tokenizer.encode("123r=")


@pytest.mark.parametrize("prompt", ["12x", "é", [{"role": "user", "content": "1"}]], ids=["x", "é", "no-template"])
def test_an_unencodable_prompt_is_a_prompt_error(model: Path, prompt: Any) -> None:
    with pytest.raises(PromptError):
        Tokenizer(model).encode(prompt)
    with pytest.raises(PromptError):
        Tokenizer(model).encode_observation("12x")


@pytest.mark.parametrize(
    ("file", "listed", "found", "left_out"),
    [
        ("generation_config.json", [9, 5], [5, 9], []),
        ("generation_config.json", [VOCABULARY, VOCABULARY - 1], [VOCABULARY - 1], [[VOCABULARY]]),
        ("config.json", 9, [9], []),  # which counts without a generation_config.json
        ("config.json", [9], [9], []),
    ],
)
def test_stop_tokens_of_tokenizer_and_configs_are_joined(
    model: Path, tmp_path: Path, file: str, listed: Any, found: list[int], left_out: list[list[int]]
) -> None:
    eos = TOKENS.index(EOS)
    assert Tokenizer(model).eos_token_ids == (eos,)
    copy = changed(model, tmp_path, file, eos_token_id=listed)
    if file == "config.json":
        (copy / "generation_config.json").unlink()
    with capture_logs() as logs:
        assert Tokenizer(copy).eos_token_ids == (eos, *found)
    assert [line["left_out"] for line in logs if line["log_level"] == "warning"] == left_out


def test_the_fingerprint_depends_on_tokenizer_and_template(model: Path, tmp_path: Path) -> None:
    assert Tokenizer(model).fingerprint() == Tokenizer(model).fingerprint()
    (tmp_path / "chat").mkdir()
    chatty = changed(model, tmp_path / "chat", "tokenizer_config.json", chat_template=TEMPLATE)
    other = changed(model, tmp_path, "tokenizer.json", pre_tokenizer=None)
    assert len({Tokenizer(each).fingerprint() for each in (model, chatty, other)}) == 3


def test_missing_slow_or_remote_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    for name in ("missing", "slow", "remote"):
        (tmp_path / name).mkdir()
    shutil.copy(model / "config.json", tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path / "missing")
    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    with pytest.raises(ConfigError, match="ByT5Tokenizer"):
        Tokenizer(tmp_path / "slow")
    remote = with_remote_code(model, tmp_path / "remote", model_type="acme", tokenizer=True)
    with pytest.raises(ConfigError, match="code"):
        Tokenizer(remote)


def test_tekken_json_is_ignored(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("mistral_common")
    copy = changed(model, tmp_path, "config.json", model_type="mistral")
    (copy / "tekken.json").write_bytes((files("mistral_common") / "data" / "tekken_240911.json").read_bytes())
    assert Tokenizer(copy).encode("123r") == Tokenizer(model).encode("123r")
