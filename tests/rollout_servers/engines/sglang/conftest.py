"""A stub that runs as an engine's server does, and a model."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from slipstream.rollout_servers.engines.sglang.server import ServerProcess
from tests.contract.policies import write_policy
from tests.rollout_servers.engines.sglang.http_stub import command


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    """A healthy stub in a process of its own."""
    started = await ServerProcess.start(command(tmp_path), deadline_s=60.0)
    yield started
    await started.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is not tied to its embedding."""
    folder = tmp_path_factory.mktemp("policy") / "model"
    write_policy(folder, tied=False)
    return folder
