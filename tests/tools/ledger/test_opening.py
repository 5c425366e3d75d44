"""How a ledger is found: in the run's own Redis, or in what a crashed or finished run left in its folder."""

import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
import redis as redis_py

from slipstream.buffer.store.redis import connect
from slipstream.configs import RunConfig
from slipstream.configs.load import create_run_folder
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE
from slipstream.tools.launch.redis import served_copy
from tests.conftest import free_port
from tests.tools.ledger.conftest import MakeRun, embedded
from tests.tools.ledger.runs import SOUND, CommandLine, on, play


@pytest.fixture
def crashed(make_run: MakeRun) -> RunConfig:
    """A run whose embedded server was killed. `always`: with `everysec` a write may wait for the disk's last sync."""
    config = make_run(redis={"port": free_port(), "fsync": "always"})
    with embedded(config):
        on(config, lambda redis, ledger: play(redis, ledger, config))
    return config


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def append_only_file(config: RunConfig) -> Path:
    (file,) = config.paths.redis.glob("appendonlydir/*.incr.aof")
    return file


def test_a_server_that_always_syncs_loses_nothing_that_it_acknowledged_when_killed(
    ledger: CommandLine, crashed: RunConfig
) -> None:
    assert (ledger("verify", crashed.folder), ledger.out, ledger.err) == (0, SOUND, "")


def test_the_data_of_a_run_that_is_over_stay_as_they_are_and_the_copy_is_removed(
    ledger: CommandLine, crashed: RunConfig, temporary: Path
) -> None:
    before = files(crashed.paths.redis)
    assert ledger("verify", crashed.folder) == 0
    assert files(crashed.paths.redis) == before
    assert list(temporary.iterdir()) == []


def test_a_file_that_was_cut_off_is_checked_without_its_last_command(
    ledger: CommandLine, crashed: RunConfig, temporary: Path
) -> None:
    file = append_only_file(crashed)
    os.truncate(file, file.stat().st_size - 7)
    before = files(crashed.paths.redis)
    assert ledger("verify", crashed.folder) == 0
    # The last lease is gone, as a whole: its two groups are ready again.
    assert ledger.out == SOUND.replace("2 ready + 2 leased", "4 ready + 0 leased")
    assert f"the last command in {crashed.folder}/redis was cut off" in ledger.err
    assert files(crashed.paths.redis) == before
    assert list(temporary.iterdir()) == []


def test_data_that_the_server_does_not_take_are_an_error_in_its_words(
    ledger: CommandLine, crashed: RunConfig, temporary: Path
) -> None:
    file = append_only_file(crashed)
    file.write_bytes(b"*1\r\nnonsense" + file.read_bytes())
    assert ledger("verify", crashed.folder) == 1
    assert "can't load a copy" in ledger.err
    assert "Bad file format" in ledger.err
    assert list(temporary.iterdir()) == []


def test_a_run_that_goes_on_is_checked_in_place(ledger: CommandLine, make_run: MakeRun, temporary: Path) -> None:
    config = make_run(redis={"port": free_port()})
    with embedded(config):
        on(config, lambda redis, opened: play(redis, opened, config))
        temporary.rmdir()  # a copy would have nowhere to go
        assert (ledger("verify", config.folder), ledger.out) == (0, SOUND)


def test_a_server_of_another_run_on_the_same_port_is_not_mistaken_for_this_runs(
    ledger: CommandLine, crashed: RunConfig
) -> None:
    other = crashed.model_copy(update={"run": crashed.run.model_copy(update={"name": "other"})})
    with embedded(other), connect(other.redis) as client:
        assert (ledger("verify", crashed.folder), ledger.out) == (0, SOUND)
        assert client.dbsize() == 0


def test_a_server_that_somebody_started_for_the_run_is_asked(ledger: CommandLine, make_run: MakeRun) -> None:
    config = make_run(redis={"port": free_port()})
    with embedded(config.model_copy(update={"run": config.run.model_copy(update={"name": "elsewhere"})})):
        on(config, lambda redis, opened: play(redis, opened, config))
        assert (ledger("verify", config.folder), ledger.out) == (0, SOUND)


def test_a_password_in_the_environment_keeps_nobody_from_looking(
    ledger: CommandLine, crashed: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REDIS_PASSWORD_VARIABLE, "s3cret")
    assert (ledger("verify", crashed.folder), ledger.out) == (0, SOUND)


def test_a_run_can_be_named_by_its_name_its_configuration_or_not_at_all(
    ledger: CommandLine, played: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(played.folder.parent.parent)
    older = played.folder.parent / "older"
    older.mkdir()
    (older / "config.yaml").touch()
    os.utime(older / "config.yaml", (0, 0))
    for run in ([played.run.name], [played.paths.config], []):
        assert (ledger("verify", *run), ledger.out) == (0, SOUND)


def test_a_run_that_is_not_there_is_an_error_that_names_those_that_are(
    ledger: CommandLine, played: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(played.folder.parent.parent)
    assert ledger("verify", "nosuch") == 2
    assert "there is no run 'nosuch'" in ledger.err
    assert played.run.name in ledger.err
    assert ledger("verify", played.folder.parent) == 2
    assert "holds no config.yaml" in ledger.err
    monkeypatch.chdir(tmp_path / "runs")
    assert ledger("verify") == 2
    assert "there is no run in" in ledger.err


def test_a_configuration_of_another_release_is_named(ledger: CommandLine, make_run: MakeRun) -> None:
    written = make_run().paths.config
    written.write_text(written.read_text() + "gone: {key: 1}\n")
    assert ledger("verify", written.parent) == 2
    assert ledger.err.startswith(f"error: {written}: gone: unknown key")


def test_a_folder_without_data_is_an_error(ledger: CommandLine, make_run: MakeRun) -> None:
    config = make_run(redis={"port": free_port()})
    assert ledger("verify", config.folder) == 2
    assert f"there is no {config.folder}/redis/appendonlydir" in ledger.err


def test_a_server_elsewhere_that_does_not_answer_is_named(ledger: CommandLine, make_run: MakeRun) -> None:
    config = make_run(redis={"url": f"redis://127.0.0.1:{free_port()}/0"})
    assert ledger("verify", config.folder) == 1
    assert f"Redis at {config.redis.address} does not answer" in ledger.err
    assert "redis.url" in ledger.err


def test_a_run_of_which_redis_holds_nothing_is_not_called_sound(ledger: CommandLine, make_run: MakeRun) -> None:
    config = make_run()
    assert ledger("verify", config.folder) == 1
    assert f"holds nothing of run '{config.run.name}'" in ledger.err


def test_the_folder_that_one_stands_in_is_not_taken_for_one_that_was_moved_aside(
    ledger: CommandLine, played: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(played.folder)
    assert (ledger("verify", "."), ledger.out, ledger.err) == (0, SOUND, "")


def test_a_folder_that_was_moved_aside_is_not_checked_against_its_successor(
    ledger: CommandLine, played: RunConfig
) -> None:
    aside = played.folder.rename(played.folder.with_name(f"{played.run.name}.1"))
    assert ledger("verify", aside) == 1
    assert "moved aside" in ledger.err


def test_a_ledger_of_other_shards_is_refused(ledger: CommandLine, played: RunConfig) -> None:
    config = played.model_copy(update={"buffer": played.buffer.model_copy(update={"shards": 2})})
    create_run_folder(played.paths, config)
    assert ledger("verify", played.folder) == 2
    assert "buffer.shards is '2', but '1' since the run began" in ledger.err


def test_an_error_of_redis_is_one_line(ledger: CommandLine, played: RunConfig, redis_url: str) -> None:
    with redis_py.Redis.from_url(redis_url) as client:
        prefix = f"{{slipstream:{played.run.name}:0}}"
        client.delete(f"{prefix}:ready")
        client.set(f"{prefix}:ready", "no sorted set")
        assert ledger("verify", played.folder) == 1
    assert ledger.err.startswith(f"error: Redis at {played.redis.address} can't be used: ")


def test_a_copy_and_its_server_are_gone_when_the_look_is_ended_by_a_signal(crashed: RunConfig, temporary: Path) -> None:
    with pytest.raises(SystemExit) as ended, served_copy(crashed.paths.redis) as copy:
        with connect(copy) as client:
            server = client.info("server")["process_id"]
        assert psutil.pid_exists(server)
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not psutil.pid_exists(server)
    assert list(temporary.iterdir()) == []
