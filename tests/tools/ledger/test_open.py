"""The ledger of a run: in its own Redis, or in a copy of the data that a crashed or finished run left."""

import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
import redis as redis_py

from slipstream.buffer.store.redis import connect, run_prefix
from slipstream.configs import RunConfig
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE
from slipstream.tools.launch.redis import served_copy
from tests.conftest import free_port
from tests.tools.conftest import CommandLine
from tests.tools.ledger.conftest import SOUND, MakeRun, embedded, play


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def append_only_file(config: RunConfig) -> Path:
    (file,) = config.paths.redis.glob("appendonlydir/*.incr.aof")
    return file


# --- data of a crashed or finished run --------------------------------------------------------------------------------


@pytest.mark.parametrize("password", [None, "s3cret"])
def test_killed_server_with_fsync_always_loses_nothing(
    ledger: CommandLine, crashed: RunConfig, monkeypatch: pytest.MonkeyPatch, password: str | None
) -> None:
    if password is not None:
        monkeypatch.setenv(REDIS_PASSWORD_VARIABLE, password)
    assert (ledger("verify", crashed.paths.root), ledger.out, ledger.err) == (0, SOUND, "")


def test_truncated_file_is_read_without_its_last_command(
    ledger: CommandLine, crashed: RunConfig, temporary: Path
) -> None:
    file = append_only_file(crashed)
    os.truncate(file, file.stat().st_size - 7)
    before = files(crashed.paths.redis)
    assert ledger("verify", crashed.paths.root) == 0
    # The last lease is undone: its two groups are ready again.
    assert ledger.out == SOUND.replace("2 ready + 2 leased", "4 ready + 0 leased")
    assert f"{crashed.paths.root}/redis" in ledger.err
    assert files(crashed.paths.redis) == before
    assert list(temporary.iterdir()) == []


def test_unreadable_data_is_reported_with_the_server_error(
    ledger: CommandLine, crashed: RunConfig, temporary: Path
) -> None:
    (base,) = crashed.paths.redis.glob("appendonlydir/*.base.rdb")
    base.write_bytes(b"nonsense" + base.read_bytes())
    assert ledger("verify", crashed.paths.root) == 1
    assert base.name in ledger.err
    assert list(temporary.iterdir()) == []


def test_signal_removes_the_copy_and_its_server(crashed: RunConfig, temporary: Path) -> None:
    with pytest.raises(SystemExit) as ended, served_copy(crashed.paths.redis) as copy:
        with connect(copy) as client:
            server = client.info("server")["process_id"]
        assert psutil.pid_exists(server)
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not psutil.pid_exists(server)
    assert list(temporary.iterdir()) == []


# --- a Redis that answers ---------------------------------------------------------------------------------------------


def renamed(config: RunConfig, name: str) -> RunConfig:
    """Another run on the same port."""
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


@pytest.mark.parametrize("served", [None, "elsewhere"], ids=["of the run", "started by hand"])
def test_answering_server_is_read_in_place(
    ledger: CommandLine, make_run: MakeRun, temporary: Path, served: str | None
) -> None:
    config = make_run(redis={"port": free_port()})
    with embedded(renamed(config, served) if served else config):
        play(config)
        temporary.rmdir()  # a copy would have no place
        assert (ledger("verify", config.paths.root), ledger.out) == (0, SOUND)


def test_server_of_another_run_on_the_port_is_not_read(ledger: CommandLine, crashed: RunConfig) -> None:
    other = renamed(crashed, "other")
    with embedded(other), connect(other.redis) as client:
        assert (ledger("verify", crashed.paths.root), ledger.out) == (0, SOUND)
        assert client.dbsize() == 0


def test_missing_data_server_or_run_is_named(ledger: CommandLine, make_run: MakeRun) -> None:
    config = make_run(redis={"port": free_port()})
    assert ledger("verify", config.paths.root) == 2
    assert f"{config.paths.root}/redis/appendonlydir" in ledger.err
    config = make_run(redis={"url": f"redis://127.0.0.1:{free_port()}/0"})
    assert ledger("verify", config.paths.root) == 1
    assert config.redis.address in ledger.err
    assert "redis.url" in ledger.err
    config = make_run()
    assert ledger("verify", config.paths.root) == 1
    assert f"'{config.run.name}'" in ledger.err


def test_training_without_a_buffer_has_no_ledger(ledger: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    trainer = "{name: sft, data: rows.jsonl}"
    file.write_text(f"run: {{dir: {tmp_path}}}\nmodel: {{build: digits}}\nlearner: {{trainer: {trainer}}}\n")
    assert ledger("verify", file) == 1
    assert "sft" in ledger.err


def test_redis_error_is_one_line(ledger: CommandLine, played: RunConfig, redis_url: str) -> None:
    with redis_py.Redis.from_url(redis_url) as client:
        prefix = run_prefix(played.run.name)
        client.delete(f"{prefix}:ready")
        client.set(f"{prefix}:ready", "no sorted set")
        assert ledger("verify", played.paths.root) == 1
    (line,) = ledger.err.splitlines()
    assert line.startswith(f"error: Redis at {played.redis.address} ")


# --- the name of a run ------------------------------------------------------------------------------------------------


def test_run_is_found_by_name_configuration_or_age(
    ledger: CommandLine, played: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(played.paths.root.parent.parent)
    older = played.paths.root.parent / "older"
    older.mkdir()
    (older / "config.yaml").touch()
    os.utime(older / "config.yaml", (0, 0))
    for run in ([played.run.name], [played.paths.config], []):
        assert (ledger("verify", *run), ledger.out) == (0, SOUND)
    monkeypatch.chdir(played.paths.root)
    assert (ledger("verify", "."), ledger.out, ledger.err) == (0, SOUND, "")


def test_unknown_run_is_refused(
    ledger: CommandLine, played: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(played.paths.root.parent.parent)
    assert ledger("verify", "nosuch") == 2
    assert "'nosuch'" in ledger.err
    assert played.run.name in ledger.err, "known runs are listed"
    assert ledger("verify", played.paths.root.parent) == 2
    assert "config.yaml" in ledger.err
    monkeypatch.chdir(tmp_path / "runs")
    assert ledger("verify") == 2
    assert str(tmp_path / "runs") in ledger.err


def test_configuration_of_another_release_is_named(ledger: CommandLine, make_run: MakeRun) -> None:
    written = make_run().paths.config
    written.write_text(written.read_text() + "gone: {key: 1}\n")
    assert ledger("verify", written.parent) == 2
    assert ledger.err.startswith(f"error: {written}: gone: ")


def test_folder_that_was_moved_aside_is_refused(ledger: CommandLine, played: RunConfig) -> None:
    aside = played.paths.root.rename(played.paths.root.with_name(f"{played.run.name}.1"))
    assert ledger("verify", aside) == 1
    assert str(aside) in ledger.err
