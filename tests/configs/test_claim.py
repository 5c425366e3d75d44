"""A run's folder that is one process's alone."""

from pathlib import Path

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.paths import LEARNER, UP, hold_run_lock, is_run_locked, require_unlocked
from slipstream.configs.runtime.errors import ConfigError


def config_in(folder: Path) -> RunConfig:
    return RunConfig.model_validate({"run": {"name": "small", "dir": folder}, "model": {"build": "digits"}})


@pytest.mark.parametrize("by", [UP, LEARNER])
def test_a_second_one_of_a_kind_is_refused_until_the_first_lets_go(tmp_path: Path, by: str) -> None:
    config = config_in(tmp_path)
    folder = config.paths
    refusal = rf"small is in use by another {by} \(process \d+ on .*\): stop that, or choose another run\.name"
    with hold_run_lock(config.paths, by=by):
        assert is_run_locked(folder)
        with pytest.raises(ConfigError, match=refusal), hold_run_lock(config.paths, by=by):
            pass
        with pytest.raises(ConfigError, match=refusal):
            require_unlocked(folder)
    assert not is_run_locked(folder)
    require_unlocked(folder)
    with hold_run_lock(config.paths, by=by):
        pass


def test_up_and_its_own_learner_are_at_one_folder(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with hold_run_lock(config.paths, by=UP), hold_run_lock(config.paths, by=LEARNER):
        pass


def test_learners_of_two_hosts_may_be_at_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path)
    with hold_run_lock(config.paths, by=LEARNER):
        monkeypatch.setattr("socket.gethostname", lambda: "another-host")
        with hold_run_lock(config.paths, by=LEARNER):
            pass


@pytest.mark.parametrize("by", [UP, LEARNER])
def test_a_folder_that_cannot_be_claimed_is_named_with_its_key(tmp_path: Path, by: str) -> None:
    (tmp_path / "runs").write_text("a file")
    config = config_in(tmp_path / "runs")
    with pytest.raises(ConfigError, match=r"run\.dir=.*runs: can't write"), hold_run_lock(config.paths, by=by):
        pass
