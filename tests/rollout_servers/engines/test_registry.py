"""Starting an engine that this environment or configuration can't have."""

import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.registry import resolved_core, start_engine
from tests.contract.engines import VLLM_WARNINGS

pytestmark = VLLM_WARNINGS


async def start(folder: Path, engine: dict[str, Any], **weights: object) -> None:
    config = RunConfig.model_validate({"model": {"path": folder}, "rollout": {"engine": engine}, "weights": weights})
    await start_engine(config, folder, eos_token_ids=())


@pytest.mark.parametrize(
    ("engine", "transport", "reason"),
    [
        ({"core": "inline"}, "nccl", r"weights\.transport=nccl .* vllm/inline"),
        ({"name": "hf"}, "nccl", r"weights\.transport=nccl .* hf"),
        ({"core": "process"}, "nccl", r"weights\.transport=nccl needs a GPU"),
        ({"core": "inline", "options": {"tensor_parallel_size": 2}}, "auto", "core=inline.*tensor_parallel_size=2"),
        ({"core": "process", "options": {"data_parallel_size": 2}}, "auto", "data_parallel_size"),
    ],
    ids=["inline-nccl", "hf-nccl", "nccl-on-a-cpu", "inline-tensor-parallel", "process-data-parallel"],
)
async def test_unsupported_settings_are_refused(
    tmp_path: Path, engine: dict[str, Any], transport: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        await start(tmp_path, engine, transport=transport)


@pytest.mark.parametrize(
    ("engine", "gpu", "core"),
    [
        ({}, False, "inline"),
        ({}, True, "process"),
        ({"options": {"tensor_parallel_size": 2}}, False, "process"),
        ({"core": "process"}, False, "process"),
        ({"core": "inline"}, True, "inline"),
    ],
)
def test_core_is_chosen_by_the_host(engine: dict[str, Any], gpu: bool, core: str, tmp_path: Path) -> None:
    config = RunConfig.model_validate({"model": {"path": tmp_path}, "rollout": {"engine": engine}})
    assert resolved_core(config.rollout.engine, config.weights, gpu=gpu) == core


async def test_missing_vllm_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of it now fails
    for module in ("engine", "inline"):
        monkeypatch.delitem(sys.modules, f"slipstream.rollout_servers.engines.vllm.{module}", raising=False)
    with pytest.raises(ConfigError, match=r"slipstream\[vllm\]"):
        await start(tmp_path, {"core": "inline"})
