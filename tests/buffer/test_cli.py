"""The console script `buffer`, as a process of its own."""

import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.buffer.client import BufferClient
from slipstream.configs import RunConfig
from slipstream.configs.load import dump_config
from tests.buffer.conftest import MakeConfig
from tests.conftest import free_port
from tests.ipv6 import needs_ipv6

PATIENCE_S = 30.0


@contextmanager
def buffer(config: RunConfig, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    file = folder / "run.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    command = [sys.executable, "-m", "slipstream.buffer.cli", str(file), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_it_serves(config: RunConfig, process: subprocess.Popen[str]) -> None:
    lines = config.paths.logs / "buffer.jsonl"
    give_up = time.monotonic() + PATIENCE_S
    while not lines.exists() or "buffer serves" not in lines.read_text(encoding="utf-8"):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < give_up, "the buffer did not say that it serves"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "host"), [(signal.SIGTERM, "127.0.0.1"), pytest.param(signal.SIGINT, "[::1]", marks=needs_ipv6)]
)
def test_service_runs_until_a_signal(
    make_config: MakeConfig, tmp_path: Path, number: signal.Signals, host: str
) -> None:
    address = f"tcp://{host}:{free_port()}"
    config = make_config(bind=address, endpoint=address)
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    try:
        with buffer(config, tmp_path) as process:
            wait_until_it_serves(config, process)
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (most, most)
            client = BufferClient(config, "learner")
            assert client.hello(0).version == 0
            client.close()
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == {signal.SIGTERM: 0, signal.SIGINT: 130}[number]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def test_service_ends_with_the_run(make_config: MakeConfig, tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    config = make_config(bind=address, endpoint=address)
    with buffer(config, tmp_path, "--until-finished") as process:
        wait_until_it_serves(config, process)
        for ping, code in (("--ping", 0), ("--ping=rollout-", 1)):
            with buffer(config, tmp_path, ping) as asking:
                assert asking.wait(PATIENCE_S) == code
        config.paths.summary.write_text("{}")
        assert process.wait(PATIENCE_S) == 0
    with buffer(config, tmp_path, "buffer.reply_deadline_s=0.1", "--ping") as asking:
        assert asking.wait(PATIENCE_S) == 1
    with buffer(config, tmp_path, "--ping", "buffer.reply_deadline_s=0.1") as refused:  # no server has such a name
        assert refused.wait(PATIENCE_S) == 2


def test_signal_stops_wait_for_redis(make_config: MakeConfig, tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        config = with_redis(make_config(), f"redis://127.0.0.1:{silent.getsockname()[1]}/0", deadline_s=60.0)
        with buffer(config, tmp_path) as process:
            wait_until_it_serves(config, process)
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE_S) == 0


def test_missing_redis_fails_within_deadline(
    make_config: MakeConfig, tmp_path: Path, free_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_REDIS_PASSWORD", "secret")
    port = free_address.rpartition(":")[2]
    free = make_config(bind=f"tcp://127.0.0.1:{free_port()}")
    config = with_redis(free, f"redis://127.0.0.1:{port}/0", deadline_s=0.5)
    with buffer(config, tmp_path) as process:
        wait_until_it_serves(config, process)
        assert process.wait(PATIENCE_S) == 1
        stderr = process.communicate()[1]
    assert f"redis://127.0.0.1:{port}/0 can't be used" in stderr
    assert "Traceback" not in stderr
    assert "secret" not in stderr


def with_redis(config: RunConfig, url: str, *, deadline_s: float) -> RunConfig:
    section = config.redis.model_copy(update={"url": url, "deadline_s": deadline_s, "outage_deadline_s": deadline_s})
    return config.model_copy(update={"redis": section})
