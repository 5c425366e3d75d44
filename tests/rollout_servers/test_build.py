"""Starting an engine."""

from pathlib import Path

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.errors import ConfigError
from slipstream.rollout_servers.engines.build import start_engine


async def test_an_inline_engine_that_is_to_receive_over_nccl_is_refused_at_once(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {"model": {"path": tmp_path}, "rollout": {"engine": {"core": "inline"}}, "weights": {"transport": "nccl"}}
    )
    with pytest.raises(ConfigError, match=r"core=inline.*gloo only; set rollout\.engine\.core=process"):
        await start_engine(config, tmp_path, eos_token_ids=())
