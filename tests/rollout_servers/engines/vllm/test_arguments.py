"""What vLLM is started with, and what it finds in its environment."""

from pathlib import Path

import pytest

from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.vllm.arguments import engine_arguments, prepare_environment


@pytest.mark.parametrize(("gpu", "method"), [(True, "spawn"), (False, None)])
def test_on_a_gpu_vllms_processes_are_not_forked_off_one_that_has_called_cuda(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, method: str | None
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    prepare_environment(gpu=gpu)
    assert environment.get("VLLM_WORKER_MULTIPROC_METHOD") == method


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    monkeypatch.setattr("os.environ", environment)
    prepare_environment(gpu=True)
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


@pytest.mark.parametrize(("stale", "said"), [(True, {"enable_prefix_caching": False}), (False, {})])
def test_prompts_share_what_they_begin_with_unless_it_would_outlive_its_weights(
    stale: bool, said: dict[str, bool], tmp_path: Path
) -> None:
    config = RunConfig.model_validate({"model": {"path": tmp_path}, "weights": {"keep_stale_kv": stale}})
    arguments = engine_arguments(config, tmp_path, gpu=True)
    assert {name: value for name, value in arguments.items() if "prefix" in name} == said
