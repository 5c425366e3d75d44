"""The run folder: its configuration file and its locks."""

from pathlib import Path

import pytest

from slipstream.configs.load import create_run_folder, load_config
from slipstream.configs.paths import LEARNER, UP, RunPaths, hold_run_lock, is_run_locked, require_unlocked
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from tests.full_disk import files_of_at_most


def run(folder: Path, **model: object) -> RunConfig:
    return RunConfig.model_validate({"run": {"dir": folder}, "model": model})


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "small")


def test_unchanged_configuration_is_not_written_again(tmp_path: Path) -> None:
    config = run(tmp_path, build="digits")
    file = config.paths.config
    create_run_folder(config.paths, config)
    written = file.stat()
    with files_of_at_most(0):
        create_run_folder(config.paths, config)
    again = file.stat()  # the time of the last access may differ
    assert (again.st_ino, again.st_mtime_ns, again.st_size) == (written.st_ino, written.st_mtime_ns, written.st_size)


def test_full_disk_leaves_the_configuration_before_it(tmp_path: Path) -> None:
    before, after = run(tmp_path, build="digits"), run(tmp_path, path=tmp_path)
    paths = before.paths
    create_run_folder(paths, before)
    with files_of_at_most(100), pytest.raises(ConfigError, match=f"run.dir={tmp_path}: .*{paths.config}"):
        create_run_folder(paths, after)
    assert load_config(paths.config, []) == before
    assert {path.name for path in paths.root.iterdir()} == {"config.yaml", "logs"}
    create_run_folder(paths, after)
    assert load_config(paths.config, []) == after


@pytest.mark.parametrize("by", [UP, LEARNER])
def test_second_holder_of_a_kind_is_refused_until_release(paths: RunPaths, by: str) -> None:
    refusal = rf"small .*{by} \(process \d+ on .*run\.name"
    with hold_run_lock(paths, by=by):
        assert is_run_locked(paths)
        with pytest.raises(ConfigError, match=refusal), hold_run_lock(paths, by=by):
            pass
        with pytest.raises(ConfigError, match=refusal):
            require_unlocked(paths)
    assert not is_run_locked(paths)
    require_unlocked(paths)
    with hold_run_lock(paths, by=by):
        pass


def test_up_and_learners_of_two_hosts_share_a_folder(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_run_lock(paths, by=UP), hold_run_lock(paths, by=LEARNER):
        monkeypatch.setattr("socket.gethostname", lambda: "another-host")
        with hold_run_lock(paths, by=LEARNER):
            pass


@pytest.mark.parametrize("by", [UP, LEARNER])
def test_folder_without_room_for_a_lock_is_named(tmp_path: Path, by: str) -> None:
    (tmp_path / "runs").write_text("a file")
    with (
        pytest.raises(ConfigError, match=rf"run\.dir={tmp_path}/runs:"),
        hold_run_lock(RunPaths(tmp_path / "runs" / "small"), by=by),
    ):
        pass
