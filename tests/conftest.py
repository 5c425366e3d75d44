"""Fixtures for all tests: a Redis-protocol server, names of runs, free ports, and processes forked with imports."""

import importlib.util
import os
import random
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from slipstream.configs import RunConfig
from slipstream.sandbox import SandboxUnavailable, find_interpreter
from slipstream.tools.launch.redis import redis_command, wait_until_ready

# Before anything imports torch: its threads would spin on cores that other processes of a test need.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# For `benchmarks`, which is not installed; last, because `env` and `tools` are folders there too.
sys.path.append(str(Path(__file__).parents[1]))

# The same examples each time, so that a failure is due to a change; no deadlines, because machines may be busy.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# Below the kernel's range for outgoing connections, which could take a port before the test listens on it. Each port is
# given once, in random order, from a set of this xdist worker's own.
_WORKER, _WORKERS = (
    int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]),
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
)
_PORTS = iter(random.sample(range(15_000 + _WORKER, 32_000, _WORKERS), 17_000 // _WORKERS))


def free_port() -> int:
    """A port without a listener that no other test of the session gets."""
    for port in _PORTS:
        if _is_free(port):
            return port
    raise AssertionError("no port is left")


def wait_until_free(port: int, patience_s: float = 60) -> None:
    """Waits until nobody listens on a port: a process that is just being started still holds its parent's sockets."""
    deadline = time.monotonic() + patience_s
    while not _is_free(port):
        assert time.monotonic() < deadline, f"port {port} still has a listener"
        time.sleep(0.05)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False  # it has a listener
        return True


@contextmanager
def embedded_redis(folder: Path) -> Iterator[str]:
    """Runs an embedded server with its files in `folder`; yields its address."""
    config = RunConfig.model_validate(
        {
            "run": {"name": "redis", "dir": str(folder)},
            "model": {"build": "digits"},
            "redis": {"port": free_port()},
        }
    )
    with subprocess.Popen(
        redis_command(config.redis, config.paths.redis), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            wait_until_ready(config.redis, 60)
            yield config.redis.address
        finally:
            server.terminate()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of one embedded server for the session; tests differ by the names of their runs."""
    with embedded_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="session")
def sandbox() -> None:
    """Skips the tests where programs can't be run in the sandbox."""
    try:
        find_interpreter()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServerContext]:
    """Context for processes that start with torch, vLLM and the project already imported, which takes seconds."""
    from tests.pipeline.forked import fork_server

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1])  # inherited by forked processes
        yield fork_server()


@pytest.fixture(scope="module")
def prompt_vllm(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a CPU, forks AsyncLLM's engine cores from `forks`, and inspects model classes in this process.

    vLLM would start a process for each class that it has not inspected on this machine before.
    """
    from slipstream.rollout_servers.engines.vllm.arguments import has_gpu

    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("vllm") is not None and not has_gpu():
            forks = request.getfixturevalue("forks")
            patch.setattr("vllm.v1.engine.utils.get_mp_context", lambda: forks)
            patch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look())
        yield


@pytest.fixture
def run_name() -> str:
    """A unique name of a run."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def free_address() -> str:
    """A loopback address for ZeroMQ without a listener."""
    return f"tcp://127.0.0.1:{free_port()}"
