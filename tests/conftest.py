"""What every test may ask for: a real Redis-protocol server, and a run of its own on it."""

import socket
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from slipstream.configs import RunConfig
from slipstream.tools.redis_server import redis_command, wait_until_ready


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one embedded server for the whole session; tests keep apart by the names of their runs."""
    config = RunConfig.model_validate(
        {
            "run": {"name": "redis", "dir": str(tmp_path_factory.mktemp("redis"))},
            "model": {"build": "digits"},
            "redis": {"port": free_port()},
        }
    )
    with subprocess.Popen(redis_command(config), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until_ready(config.redis.address, 20)
            yield config.redis.address
        finally:
            server.terminate()


@pytest.fixture
def run_name() -> str:
    """The name of a run that no other test uses."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def free_address() -> str:
    """A loopback address for ZeroMQ on which nothing listens."""
    return f"tcp://127.0.0.1:{free_port()}"
