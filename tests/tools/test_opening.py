"""A run folder that is already there: refused, moved aside, or continued."""

import re
from pathlib import Path

import pytest

from slipstream.configs.load import create_run_folder, load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.tools.launch.preflight import finished_problems, prepare_folder
from tests.tools.run_command import demo_config


@pytest.mark.parametrize("overrides", [[], ["model={path: /models/mine}"]], ids=["built", "from a folder"])
def test_what_is_said_of_training_a_finished_model_further_is_a_configuration(
    tmp_path: Path, overrides: list[str]
) -> None:
    config = demo_config(tmp_path, *overrides)
    folder = config.paths
    create_run_folder(folder, config)
    folder.summary.write_text("{}")
    (problem,) = finished_problems(config, fresh=False)
    advice = re.search(r"\(with (.*) to train its model further\)", problem)
    assert advice is not None
    assert demo_config(tmp_path, *overrides, *advice[1].split()).model.path == folder.export


def test_a_fresh_run_moves_the_old_folder_aside(tmp_path: Path) -> None:
    config = demo_config(tmp_path)
    folder = config.paths
    for number in (1, 2):
        create_run_folder(folder, config)
        folder.summary.write_text(str(number))
        assert finished_problems(config, fresh=False)
        assert not finished_problems(config, fresh=True)
        assert f"demo.{number}" in prepare_folder(config, fresh=True)
        assert not folder.summary.exists()
    assert folder.config.exists()
    assert (folder.root.with_name("demo.1") / "summary.json").read_text() == "1"
    assert (folder.root.with_name("demo.2") / "summary.json").read_text() == "2"


def test_an_unfinished_run_is_continued_and_changed_keys_are_named(tmp_path: Path) -> None:
    assert prepare_folder(demo_config(tmp_path), fresh=False).startswith("a new run in")
    assert prepare_folder(demo_config(tmp_path), fresh=False).endswith(
        "continues the unfinished run in " + str(tmp_path / "runs" / "demo")
    )
    config = demo_config(tmp_path, "learner.steps=7")
    assert prepare_folder(config, fresh=False).endswith("with another learner.steps")
    assert load_config(config.paths.config) == config


@pytest.mark.parametrize(
    ("override", "refusal"),
    [("run.seed=8", "run.seed is '8', but '"), ("env={name: jsonl}", "env.name is 'jsonl', but 'digits'")],
)
def test_a_change_that_the_run_can_not_bear_is_refused_before_the_written_configuration_is_replaced(
    tmp_path: Path, override: str, refusal: str
) -> None:
    begun = demo_config(tmp_path)
    prepare_folder(begun, fresh=False)
    with pytest.raises(ConfigError, match=f"{re.escape(refusal)}.* since the run began; restore it, .* --fresh"):
        prepare_folder(demo_config(tmp_path, override), fresh=False)
    assert load_config(begun.paths.config) == begun


@pytest.mark.parametrize("rubbish", [b"a: [1", b"\xff\xfe", b"- 1"])
def test_a_written_configuration_that_is_none_is_named(tmp_path: Path, rubbish: bytes) -> None:
    config = demo_config(tmp_path)
    prepare_folder(config, fresh=False)
    config.paths.config.write_bytes(rubbish)
    with pytest.raises(ConfigError, match=r"config\.yaml is no configuration; delete it"):
        prepare_folder(config, fresh=False)


def test_a_configuration_that_a_full_disk_left_empty_is_written_again(tmp_path: Path) -> None:
    config = demo_config(tmp_path)
    prepare_folder(config, fresh=False)
    config.paths.config.write_text("")
    assert prepare_folder(config, fresh=False).endswith(str(tmp_path / "runs" / "demo"))
    assert load_config(config.paths.config) == config
