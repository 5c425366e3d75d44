"""What vLLM is started with, and what it finds in its environment."""

from pathlib import Path

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import EngineSettings
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
    arguments = engine_arguments(with_options({}, tmp_path, stale=stale), gpu=True)
    assert {name: value for name, value in arguments.items() if "prefix" in name} == said


@pytest.mark.parametrize(
    ("stale", "option", "value"),
    [
        (False, "logprobs_mode", "raw_logprobs"),
        (False, "seed", 7),
        (False, "skip_tokenizer_init", False),
        (True, "enable_prefix_caching", True),
    ],
)
def test_options_that_would_spoil_the_answers_without_a_word_are_refused(
    stale: bool, option: str, value: object, tmp_path: Path
) -> None:
    config = with_options({option: value}, tmp_path, stale=stale)
    with pytest.raises(
        ConfigError, match=rf"rollout\.engine\.options\.{option}={value}: slipstream relies on {option}="
    ):
        engine_arguments(config, gpu=True)


def test_all_other_options_go_to_vllm_as_they_are(tmp_path: Path) -> None:
    options = {
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": 3,
        "block_size": 32,
    }
    assert engine_arguments(with_options(options, tmp_path), gpu=True).items() >= options.items()


def with_options(options: dict[str, object], path: Path, *, stale: bool = False) -> EngineSettings:
    config = RunConfig.model_validate(
        {"model": {"path": path}, "rollout": {"engine": {"options": options}}, "weights": {"keep_stale_kv": stale}}
    )
    return EngineSettings.from_config(config, path, eos_token_ids=())
