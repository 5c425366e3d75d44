"""The engines under test, each started once."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from tests.contract.engines import ENGINES
from tests.contract.subject import Subject, children


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def subject(
    request: pytest.FixtureRequest, prompt_vllm: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    kind = ENGINES[request.param]
    if not kind.installed():
        pytest.skip(f"{request.param} is not installed here")
    before = {process.pid for process in children()}
    subject = await Subject.start(kind, tmp_path_factory.mktemp("policy") / "model")
    yield subject
    await subject.close()
    assert not torch.distributed.is_initialized(), "a closed engine leaves no process group to the tests that follow"
    assert not [process for process in children() if process.pid not in before], "nor processes"
