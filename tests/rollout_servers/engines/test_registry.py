"""Starting an engine."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.registry import start_engine

# vLLM and what it imports warn of their own futures.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize(
    ("engine", "weights", "complaint"),
    [
        (
            {"core": "inline"},
            {"transport": "nccl"},
            r"nccl goes into .* sglang only, not into vllm/inline",
        ),
        ({"name": "hf"}, {"transport": "nccl"}, r"not into hf; set rollout\.engine\.name=vllm"),
        ({"core": "process"}, {"transport": "nccl"}, r"nccl needs a GPU here; set weights\.transport=auto"),
        (
            {"core": "inline", "options": {"tensor_parallel_size": 2}},
            {},
            r"core=inline.*tensor_parallel_size=2\); set rollout\.engine\.core=process",
        ),
        ({"core": "process", "options": {"data_parallel_size": 2}}, {}, "data_parallel_size"),
    ],
    ids=["inline-nccl", "hf-nccl", "nccl-on-a-cpu", "inline-tensor-parallel", "process-data-parallel"],
)
async def test_an_engine_that_can_not_do_what_is_asked_of_it_is_refused_at_once(
    tmp_path: Path, engine: dict[str, Any], weights: dict[str, Any], complaint: str
) -> None:
    config = RunConfig.model_validate({"model": {"path": tmp_path}, "rollout": {"engine": engine}, "weights": weights})
    with pytest.raises(ConfigError, match=complaint):
        await start_engine(config, tmp_path, eos_token_ids=())
