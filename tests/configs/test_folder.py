"""Where a run's model comes from."""

from pathlib import Path

import pytest

from slipstream.configs.errors import ConfigError
from slipstream.configs.folder import initial_model
from slipstream.configs.schema import RunConfig


def run(folder: Path, **model: object) -> RunConfig:
    return RunConfig.model_validate({"run": {"dir": folder}, "model": model})


def test_a_model_that_is_to_be_built_is_there_when_asked_for_and_built_once(tmp_path: Path) -> None:
    folder = initial_model(run(tmp_path, build="digits"))
    written = (folder / "model.safetensors").stat()
    assert initial_model(run(tmp_path, build="digits")) == folder
    assert (folder / "model.safetensors").stat() == written


def test_a_model_path_without_a_model_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model.path={tmp_path} holds no config.json"):
        initial_model(run(tmp_path, path=tmp_path))


def test_a_model_path_with_a_model_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert initial_model(run(tmp_path, path=tmp_path)) == tmp_path
