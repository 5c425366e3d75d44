"""What is the inline engine's own; what every engine must do is asked in tests/contract/test_engine.py."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import EngineSettings

# vLLM and what it imports warn of their own futures.
pytestmark = [
    pytest.mark.usefixtures("vllm_environment"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def configured(folder: Path, *, stale: bool, **options: object) -> EngineSettings:
    config = RunConfig.model_validate(
        {
            "model": {"path": folder},
            "weights": {"keep_stale_kv": stale},
            "rollout": {"engine": {"core": "inline", "options": options}},
        }
    )
    return EngineSettings.from_config(config, folder, eos_token_ids=())


@pytest.mark.parametrize(("stale", "said"), [(True, {"async_scheduling": False}), (False, {})])
async def test_on_a_gpu_no_tokens_are_under_way_when_the_version_changes_unless_they_are_thrown_away(
    stale: bool, said: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.rollout_servers.engines.vllm import inline

    monkeypatch.setattr(inline, "has_gpu", lambda: True)
    arguments = inline.InlineEngine(configured(tmp_path, stale=stale))._arguments
    assert {name: value for name, value in arguments.items() if name == "async_scheduling"} == said


async def test_who_wants_tokens_under_way_then_is_refused(tmp_path: Path) -> None:
    from slipstream.rollout_servers.engines.vllm import inline

    config = configured(tmp_path, stale=True, async_scheduling=True)
    with pytest.raises(ConfigError, match=r"options\.async_scheduling=true; .*core=process"):
        await inline.InlineEngine.start(config)
