"""vLLM in a thread of this process; tests/contract/test_engine.py has what all engines share."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import EngineSettings
from tests.contract.engines import VLLM_WARNINGS

pytestmark = [pytest.mark.usefixtures("vllm_environment"), VLLM_WARNINGS]


def settings(folder: Path, *, stale: bool, **options: object) -> EngineSettings:
    engine = {"core": "inline", "options": options}
    config = RunConfig.model_validate(
        {"model": {"path": folder}, "weights": {"keep_stale_kv": stale}, "rollout": {"engine": engine}}
    )
    return EngineSettings(config, folder, eos_token_ids=())


@pytest.mark.parametrize(("stale", "arguments"), [(True, {"async_scheduling": False}), (False, {})])
async def test_stale_cache_disables_async_scheduling(
    stale: bool, arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.rollout_servers.engines.vllm import inline

    monkeypatch.setattr(inline, "has_gpu", lambda: True)
    found = inline.InlineEngine(settings(tmp_path, stale=stale))._arguments
    assert {name: value for name, value in found.items() if name == "async_scheduling"} == arguments


async def test_async_scheduling_with_stale_cache_is_refused(tmp_path: Path) -> None:
    from slipstream.rollout_servers.engines.vllm import inline

    with pytest.raises(ConfigError, match=r"options\.async_scheduling=true"):
        await inline.InlineEngine.start(settings(tmp_path, stale=True, async_scheduling=True))


# --- completions from vLLM's outputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("stop", "stop"), ("length", "length"), ("abort", "abort"), ("error", "abort"), (None, "abort")],
)
def test_unfinished_answer_is_aborted(reason: str | None, expected: str) -> None:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    from slipstream.rollout_servers.engines.vllm.engine import completions

    answer = CompletionOutput(0, "", [7, 8], None, FlatLogprobs(logprobs=[-1.0, -2.0]), finish_reason=reason)
    answer.weight_versions = [WeightVersionSpan("3", 0, 2)]
    (completion,) = completions(RequestOutput("1", None, [1], None, [answer], finished=True))
    assert (completion.finish_reason, list(completion.token_ids)) == (expected, [7, 8])
