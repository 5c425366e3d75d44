"""Checks of the run folder before a run starts."""

import re
from pathlib import Path

import pytest

from slipstream.configs.load import create_run_folder, load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.upload import RunStore
from slipstream.tools.launch.preflight import finished_problems, prepare_folder, stored_problems
from tests.tools.run_command import demo_config


@pytest.mark.parametrize("overrides", [[], ["model={path: /models/mine}"]], ids=["built", "from a folder"])
def test_finished_run_is_refused_with_overrides_that_work(tmp_path: Path, overrides: list[str]) -> None:
    config = demo_config(tmp_path, *overrides)
    create_run_folder(config.paths, config)
    config.paths.summary.write_text("{}")
    (problem,) = finished_problems(config.paths, config.model)
    advice = re.search(r"\(with (.*?) to ", problem)
    assert advice is not None
    assert demo_config(tmp_path, *overrides, *advice[1].split()).model.path == config.paths.export


@pytest.mark.parametrize("incomplete", ["", '{"steps": 12'])
def test_incomplete_summary_is_no_finished_run(tmp_path: Path, incomplete: str) -> None:
    config = demo_config(tmp_path)
    create_run_folder(config.paths, config)
    config.paths.summary.write_text(incomplete)
    assert not finished_problems(config.paths, config.model)


def test_fresh_run_moves_the_old_folder_aside(tmp_path: Path) -> None:
    config = demo_config(tmp_path)
    folder = config.paths
    for number in (1, 2):
        create_run_folder(folder, config)
        folder.summary.write_text(str(number))
        assert f"demo.{number}" in prepare_folder(config, fresh=True)
        assert not folder.summary.exists()
    assert folder.config.exists()
    assert [(folder.root.with_name(f"demo.{number}") / "summary.json").read_text() for number in (1, 2)] == ["1", "2"]


def test_fresh_run_is_refused_while_a_store_has_checkpoints(tmp_path: Path) -> None:
    config = demo_config(tmp_path, f"learner.checkpoint.upload=file://{tmp_path}/store")
    assert stored_problems(demo_config(tmp_path)) == stored_problems(config) == []
    store, folder = RunStore(str(config.learner.checkpoint.upload), run=config.run.name), tmp_path / "step-000012"
    folder.mkdir()
    (folder / "progress.json").write_text("{}")
    store.put(folder, "checkpoints/step-000012", done=set())
    (problem,) = stored_problems(config)
    assert f"{tmp_path}/store/demo" in problem
    assert "step 12" in problem


def test_continued_run_names_changed_keys(tmp_path: Path) -> None:
    assert prepare_folder(demo_config(tmp_path), fresh=False).startswith("a new run")
    assert prepare_folder(demo_config(tmp_path), fresh=False).endswith(str(tmp_path / "runs" / "demo"))
    config = demo_config(tmp_path, "learner.steps=70", "run.port_base=20000")
    assert prepare_folder(config, fresh=False).endswith("another learner.steps (400 before, 70 now)")
    assert load_config(config.paths.config) == config


@pytest.mark.parametrize(("override", "key"), [("run.seed=8", "run.seed"), ("env={name: rows}", "env.name")])
def test_incompatible_change_leaves_the_folder_alone(tmp_path: Path, override: str, key: str) -> None:
    begun = demo_config(tmp_path)
    prepare_folder(begun, fresh=False)
    with pytest.raises(ConfigError, match=f"{key} .* --fresh"):
        prepare_folder(demo_config(tmp_path, override), fresh=False)
    assert load_config(begun.paths.config) == begun


@pytest.mark.parametrize("content", [b"a: [1", b"\xff\xfe", b"- 1"])
def test_invalid_written_configuration_is_named(tmp_path: Path, content: bytes) -> None:
    config = demo_config(tmp_path)
    prepare_folder(config, fresh=False)
    config.paths.config.write_bytes(content)
    with pytest.raises(ConfigError, match=str(config.paths.config)):
        prepare_folder(config, fresh=False)


def test_empty_written_configuration_is_replaced(tmp_path: Path) -> None:
    config = demo_config(tmp_path)
    prepare_folder(config, fresh=False)
    config.paths.config.write_text("")  # as a full disk leaves it
    assert prepare_folder(config, fresh=False).endswith(str(tmp_path / "runs" / "demo"))
    assert load_config(config.paths.config) == config


def test_unfinished_run_of_another_trainer_is_refused(tmp_path: Path) -> None:
    prepare_folder(demo_config(tmp_path, "learner.trainer={name: sft, data: rows.jsonl}"), fresh=False)
    with pytest.raises(ConfigError, match=r"learner\.trainer=rl: .* one of sft"):
        prepare_folder(demo_config(tmp_path), fresh=False)
