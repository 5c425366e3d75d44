"""The engine that a configuration asks for, where it can't be had."""

import sys
from pathlib import Path

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.registry import start_engine


async def test_a_machine_without_vllm_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of it now fails
    monkeypatch.delitem(sys.modules, "slipstream.rollout_servers.engines.vllm.inline", raising=False)
    config = RunConfig.model_validate({"model": {"path": tmp_path}, "rollout": {"engine": {"core": "inline"}}})
    with pytest.raises(ConfigError, match=r"there is no vLLM here: install slipstream\[vllm\]"):
        await start_engine(config, tmp_path, eos_token_ids=())
