"""Keys of other frameworks are answered with ours."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from slipstream.configs.foreign_keys import TRL, VERL
from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.base import sections_at


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("actor_rollout_ref.rollout.n=8", "rollout.group_size"),
        ("actor_rollout_ref={rollout: {n: 8}}", "rollout.group_size"),
        ("trainer.total_epochs=15", "learner.steps"),
        ("num_generations=8", "rollout.group_size"),
        ("learner.learning_rate=1e-6", "learner.optimizer.lr"),
        ("trainer.no_such_key=1", "docs/coming-from.md"),
    ],
)
def test_unknown_key_of_another_framework_names_ours(override: str, ours: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {build: digits}", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config(file, [override])
    (problem,) = refused.value.problems
    assert problem.startswith(override.partition("=")[0])
    assert ours in problem


def test_keys_below_a_foreign_section_are_all_answered(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {build: digits}\ntrainer: {save_freq: 1, test_freq: 2}", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert [problem.partition(":")[0] for problem in refused.value.problems] == [
        "trainer.save_freq",
        "trainer.test_freq",
    ]


@pytest.mark.parametrize("ours", sorted({*VERL.values(), *TRL.values()}))
def test_named_keys_exist(ours: str) -> None:
    for path in re.findall(r"(?<![\w/])[a-z]+\.[a-z_.]+[a-z]", ours):
        sections: list[type[BaseModel]] = [RunConfig]
        keys = path.split(".")
        for place, key in enumerate(keys):
            assert any(key in section.model_fields for section in sections), path
            if key == "options":  # of an env or an engine
                break
            sections = sections_at(key, sections)
            assert sections or place == len(keys) - 1, path
