"""The model folders that a configuration names."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.load import load_config
from slipstream.configs.models import initial_model, model_problems, vocabulary_size
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.configs.schema.run import ModelConfig
from tests.configs.conftest import DEMO


def run(folder: Path, **model: object) -> RunConfig:
    return RunConfig.model_validate({"run": {"dir": folder}, "model": model})


def test_model_is_built_once(tmp_path: Path) -> None:
    folder = initial_model(run(tmp_path, build="digits"))
    written = (folder / "model.safetensors").stat()
    assert initial_model(run(tmp_path, build="digits")) == folder
    assert (folder / "model.safetensors").stat() == written


def test_model_folder_is_used_in_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert initial_model(run(tmp_path, path=tmp_path)) == tmp_path


@pytest.mark.parametrize(("path", "is_hub_name"), [("Qwen/Qwen3-0.6B", True), ("/models/x", False), ("a/b/c", False)])
def test_missing_model_is_named_with_a_remedy(path: str, is_hub_name: bool) -> None:
    with pytest.raises(ConfigError, match=rf"model.path={path} .*config.json") as caught:
        initial_model(run(Path(), path=path))
    assert (f"`hf download {path} --local-dir FOLDER`" in str(caught.value)) is is_hub_name


def test_unreadable_model_path_is_named() -> None:
    (problem,) = model_problems(ModelConfig(path=Path(300 * "a")), LearnerConfig())
    assert problem.startswith("model.path=aaa")


def test_each_missing_model_of_the_learner_is_named(tmp_path: Path) -> None:
    overrides = [
        f"run.dir={tmp_path}", "learner.kl={coefficient: 0.1, reference: org/reference}", "learner.advantage=gae",
        "learner.critic.path=/models/critic",
    ]  # fmt: skip
    config = load_config(DEMO, overrides)
    reference, critic = model_problems(config.model, config.learner)
    assert reference.startswith("learner.kl.reference=org/reference ")
    assert reference.endswith("learner.kl.reference=FOLDER")
    assert critic.startswith("learner.critic.path=/models/critic ")
    assert initial_model(config).is_dir()


def test_vocabulary_of_built_model(tmp_path: Path) -> None:
    assert vocabulary_size(initial_model(run(tmp_path, build="digits"))) == 32


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
