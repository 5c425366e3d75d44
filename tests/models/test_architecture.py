"""Facts that config.json gives about a model."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.models.architecture import vocabulary_size
from slipstream.models.digits import TOKENS, build_digits_model


def test_vocabulary_of_built_model(tmp_path: Path) -> None:
    build_digits_model(tmp_path / "built", seed=0)
    assert vocabulary_size(tmp_path / "built") == len(TOKENS) == 32


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"vocab_size": 50}, 50),
        ({"text_config": {"vocab_size": 60}}, 60),
        ({"vocab_size": 50, "text_config": {"vocab_size": 60}}, 50),
    ],
)
def test_vocabulary_is_read_from_configuration(tmp_path: Path, settings: dict[str, Any], size: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert vocabulary_size(tmp_path) == size


def test_model_without_vocabulary_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json has no vocab_size"):
        vocabulary_size(tmp_path)
