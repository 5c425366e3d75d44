"""What lies in a run's folder: its configuration, and where its model comes from."""

from pathlib import Path

import pytest

from slipstream.configs.load import create_run_folder, load_config
from slipstream.configs.models import initial_model, model_problems
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from tests.full_disk import files_of_at_most

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


def run(folder: Path, **model: object) -> RunConfig:
    return RunConfig.model_validate({"run": {"dir": folder}, "model": model})


def test_a_configuration_that_stands_in_the_folder_is_not_written_again(tmp_path: Path) -> None:
    config = run(tmp_path, build="digits")
    folder = config.paths
    create_run_folder(folder, config)
    written = folder.config.stat()
    with files_of_at_most(0):
        create_run_folder(folder, config)
    again = folder.config.stat()  # when it was last read may have changed
    assert (again.st_ino, again.st_mtime_ns, again.st_size) == (written.st_ino, written.st_mtime_ns, written.st_size)


def test_a_configuration_that_finds_no_room_leaves_the_one_before_it_whole(tmp_path: Path) -> None:
    before, after = run(tmp_path, build="digits"), run(tmp_path, path=tmp_path)
    folder = before.paths
    create_run_folder(folder, before)
    with files_of_at_most(100), pytest.raises(ConfigError, match=rf"can't write {folder.config}: File too large"):
        create_run_folder(folder, after)
    assert load_config(folder.config, []) == before
    assert {path.name for path in folder.root.iterdir()} == {"config.yaml", "logs"}
    create_run_folder(folder, after)
    assert load_config(folder.config, []) == after


def test_a_model_that_is_to_be_built_is_there_when_asked_for_and_built_once(tmp_path: Path) -> None:
    folder = initial_model(run(tmp_path, build="digits"))
    written = (folder / "model.safetensors").stat()
    assert initial_model(run(tmp_path, build="digits")) == folder
    assert (folder / "model.safetensors").stat() == written


def test_a_model_path_without_a_model_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model.path={tmp_path} holds no config.json"):
        initial_model(run(tmp_path, path=tmp_path))


@pytest.mark.parametrize(("path", "said"), [("Qwen/Qwen3-0.6B", True), ("/models/x", False), ("models/a/b", False)])
def test_a_model_path_that_may_be_a_name_on_the_hub_is_told_how_to_be_had(path: str, said: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        initial_model(run(Path(), path=path))
    advice = f"; names on the hub are not resolved: `hf download {path} --local-dir FOLDER`, then model.path=FOLDER"
    assert str(caught.value).endswith(advice) is said


def test_a_model_path_that_can_not_be_looked_at_is_named_with_its_key() -> None:
    path = Path(300 * "a")
    config = RunConfig.model_validate({"model": {"path": path}})
    assert model_problems(config) == [f"model.path={path} can't be read: File name too long"]


def test_a_model_path_with_a_model_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert initial_model(run(tmp_path, path=tmp_path)) == tmp_path


def test_each_model_that_the_learner_lacks_is_named_with_its_key_and_a_rollout_server_lacks_none(
    tmp_path: Path,
) -> None:
    overrides = [
        f"run.dir={tmp_path}", "learner.kl={coefficient: 0.1, reference: org/reference}", "learner.advantage=gae",
        "learner.critic.path=/models/critic",
    ]  # fmt: skip
    config = load_config(DEMO, overrides)
    reference, critic = model_problems(config)
    assert reference.startswith("learner.kl.reference=org/reference holds no config.json: ")
    assert reference.endswith("`hf download org/reference --local-dir FOLDER`, then learner.kl.reference=FOLDER")
    assert critic == "learner.critic.path=/models/critic holds no config.json: name a Hugging Face model folder"
    assert initial_model(config).is_dir()
