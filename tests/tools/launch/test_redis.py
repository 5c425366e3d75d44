"""The embedded Redis-protocol server."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from slipstream.buffer.store.redis import group_key, run_prefix
from slipstream.buffer.store.types import IssuedTask
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import DeadlineError, SlipstreamError
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.launch.redis import (
    cut_unfinished_script,
    forget_run,
    ping_problem,
    redis_command,
    served_copy,
    wait_until_ready,
)
from slipstream.tools.launch.supervise import Supervisor
from tests.conftest import free_port
from tests.tools.ledger.conftest import SERVER, delivered, embedded, on, play


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "kept", "dir": str(tmp_path)},
            "model": {"build": "digits"},
            "redis": {"port": free_port(), "fsync": "always"},
        }
    )


@pytest.fixture
def server(config: RunConfig, tmp_path: Path) -> Iterator[redis.Redis]:
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        child = supervisor.start("redis", redis_command(config.redis, config.paths.redis))
        wait_until_ready(config.redis, 60)
        with redis.Redis.from_url(config.redis.address, decode_responses=True) as client:
            yield client
        supervisor.stop("redis")
        child.process.wait(60)  # its first thread has ended; the others may take a moment


def test_server_is_durable_never_evicts_and_is_local(server: redis.Redis, config: RunConfig) -> None:
    expected = {
        "appendonly": "yes", "appendfsync": "always", "save": "", "maxmemory-policy": "noeviction",
        "auto-aof-rewrite-min-size": str(512 << 20), "rdbcompression": "no",
        "bind": "127.0.0.1", "dir": str(config.paths.redis),
    }  # fmt: skip
    assert server.config_get(*expected) == expected


def test_data_survives_a_restart(config: RunConfig, tmp_path: Path) -> None:
    for _ in range(2):
        with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
            child = supervisor.start("redis", redis_command(config.redis, config.paths.redis))
            wait_until_ready(config.redis, 60)
            with redis.Redis.from_url(config.redis.address) as client:
                starts = client.incr("starts")
        child.process.wait(60)
    assert starts == 2


def test_missing_server_is_named_at_the_deadline(config: RunConfig) -> None:
    assert ping_problem(config.redis)
    with pytest.raises(DeadlineError, match=f"127.0.0.1:{config.redis.port}.* 0.1 s"):
        wait_until_ready(config.redis, 0.1)


def test_forget_run_spares_other_runs(server: redis.Redis, config: RunConfig) -> None:
    for run in ("gone", "gone.2", "kept"):
        server.set(group_key(run, "g1"), "bytes")
    assert forget_run(config.redis, "gone", silent_s=10.0) == 1
    assert sorted(server.scan_iter()) == sorted(group_key(run, "g1") for run in ("gone.2", "kept"))


@pytest.mark.parametrize(("silence_s", "running"), [(3, True), (30, False)])
def test_run_with_active_servers_is_not_forgotten(
    server: redis.Redis, config: RunConfig, silence_s: int, running: bool
) -> None:
    now_s, _ = server.time()
    key = f"{run_prefix('mine')}:heard"
    server.zadd(key, {"dead": now_s - 1000, "late": now_s - silence_s})
    with pytest.raises(SlipstreamError, match=r"'mine' .* [34] s") if running else nullcontext():
        assert forget_run(config.redis, "mine", silent_s=10.0) == 1
    assert bool(server.exists(key)) == running


# --- a file that is torn in a script ----------------------------------------------------------------------------------

MULTI = b"*1\r\n$5\r\nMULTI\r\n"


@dataclass(frozen=True)
class AppendOnlyFile:
    """The append-only file of a killed server; `script` is where its last script begins."""

    config: RunConfig
    path: Path
    content: bytes
    script: int

    def tear(self, end: int) -> None:
        """Leaves the first `end` bytes."""
        for other in self.path.parent.glob("*.aof"):
            if other != self.path and other.name.endswith(".incr.aof"):
                other.unlink()
        self.path.write_bytes(self.content[:end])


@pytest.fixture
def torn(tmp_path: Path) -> AppendOnlyFile:
    config = RunConfig.model_validate(
        {
            "run": {"name": "torn", "dir": str(tmp_path)},
            "model": {"build": "digits"},
            "redis": {"port": free_port(), "fsync": "always"},
            "buffer": {"max_staleness": 20},
            "learner": {"groups_per_step": 2},
            "rollout": {"group_size": 2},
        }
    )
    with embedded(config):
        play(config)
        arriving = delivered(config, IssuedTask("10", epoch=0, position=9))
        assert on(config, lambda _, ledger: ledger.deliver([arriving])) == ["ready"]
    (path,) = config.paths.redis.glob("appendonlydir/*.incr.aof")
    content = path.read_bytes()
    return AppendOnlyFile(config, path, content, script=content.rindex(MULTI))


def test_script_torn_at_any_byte_is_cut(torn: AppendOnlyFile) -> None:
    """The last script stores a group."""
    for end in [torn.script, torn.script + 1, *range(torn.script + 2, len(torn.content) - 1, 5), len(torn.content) - 1]:
        torn.tear(end)
        assert cut_unfinished_script(torn.config.paths.redis) == end - torn.script
        assert torn.path.stat().st_size == torn.script
    torn.tear(len(torn.content))
    assert cut_unfinished_script(torn.config.paths.redis) == 0
    assert torn.path.read_bytes() == torn.content


def test_ledger_is_sound_after_torn_script_and_two_restarts(torn: AppendOnlyFile) -> None:
    inside = torn.content[torn.script :]
    commands = [torn.script + match.start() for match in re.finditer(rb"\r\n\*", inside)]
    for end in [torn.script + 1, *(position + 3 for position in commands[::3]), len(torn.content) - 1]:
        torn.tear(end)
        with embedded(torn.config):
            assert on(torn.config, lambda _, ledger: ledger.verify()) == []
            assert on(torn.config, lambda _, ledger: ledger.heartbeat({SERVER: []}, grace_s=0.0)) == {SERVER: 2}
        with embedded(torn.config):
            assert on(torn.config, lambda _, ledger: ledger.verify()) == []


def test_damaged_file_is_repaired_by_the_printed_command(torn: AppendOnlyFile) -> None:
    damaged = torn.content[: torn.script] + b"*1\r\nnonsense" + torn.content[torn.script :]
    torn.path.write_bytes(damaged)
    for load in (
        lambda: served_copy(torn.config.paths.redis).__enter__(),
        lambda: redis_command(torn.config.redis, torn.config.paths.redis),
    ):
        with pytest.raises(SlipstreamError, match=re.escape(str(torn.path))) as error:
            load()
    assert torn.path.read_bytes() == damaged
    _, _, command = str(error.value).partition("\n")
    subprocess.run(command, shell=True, check=True, input=b"y\n", capture_output=True)
    assert torn.path.read_bytes() == torn.content[: torn.script]
    with embedded(torn.config):
        assert on(torn.config, lambda _, ledger: ledger.verify()) == []
