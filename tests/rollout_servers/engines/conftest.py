"""vLLM for tests that look into it, where there is one."""

import importlib.util

import pytest

from slipstream.rollout_servers.engines.vllm.arguments import has_gpu, prepare_environment


@pytest.fixture
def vllm_environment() -> None:
    """To be imported: vLLM reads its environment then."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed here")
    prepare_environment(gpu=has_gpu())
