"""What every test may ask for: a real Redis-protocol server, and a run of its own on it."""

import importlib.util
import os
import random
import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from slipstream.configs import RunConfig
from slipstream.tools.launch.redis import redis_command, wait_until_ready

# Before anything imports torch: its threads would spin on cores that other processes of a test need.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples each time: what fails is what changed. And no deadline for one: machines may be busy.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# Below the range that the kernel takes ports for outgoing connections from: a connection of anybody's could take one
# before the test listens on it. Each is given once, in an order of this process's own; each of several processes that
# share the tests has ports of its own.
_WORKER, _WORKERS = (
    int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]),
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
)
_PORTS = iter(random.sample(range(15_000 + _WORKER, 32_000, _WORKERS), 17_000 // _WORKERS))


def free_port() -> int:
    """A port on which nothing listens, and which no other test of this session is given."""
    for port in _PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue  # somebody listens there
            return port
    raise AssertionError("every port was given once")


@contextmanager
def embedded_redis(folder: Path) -> Iterator[str]:
    """The address of an embedded server with its files in a folder."""
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
    """The address of one embedded server for the whole session; tests keep apart by the names of their runs."""
    with embedded_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServerContext]:
    """Starts processes that find torch, vLLM and the project imported, which would take each of them seconds."""
    from tests.pipeline.forked import fork_server

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1])  # forked processes inherit it
        yield fork_server()


@pytest.fixture(scope="module")
def prompt_vllm(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a CPU, AsyncLLM in this process has its cores forked likewise; vLLM's own servers spawn theirs.

    And vLLM looks at a model's class here. It starts a process for each, unless it has seen it on this machine before.
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
    """The name of a run that no other test uses."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def free_address() -> str:
    """A loopback address for ZeroMQ on which nothing listens."""
    return f"tcp://127.0.0.1:{free_port()}"
