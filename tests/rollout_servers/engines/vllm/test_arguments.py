"""Engine arguments and environment of vLLM."""

import json
from pathlib import Path

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import EngineSettings
from slipstream.rollout_servers.engines.vllm.arguments import engine_arguments, prepare_environment, uses_nccl


def settings(
    options: dict[str, object],
    *,
    stale: bool = False,
    context: int = 4096,
    rank: int | None = None,
    model: Path = Path("/a/model"),
) -> EngineSettings:
    config = RunConfig.model_validate(
        {
            "model": {"build": "digits", "lora": None if rank is None else {"rank": rank}},
            "rollout": {"engine": {"options": options, "max_model_len": context}, "sampling": {"max_tokens": 8}},
            "weights": {"keep_stale_kv": stale},
        }
    )
    return EngineSettings(config, model, eos_token_ids=())


@pytest.mark.parametrize(
    ("gpu", "before", "method"),
    [(True, {}, "spawn"), (False, {}, None), (True, {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, "fork")],
    ids=["gpu", "cpu", "set-by-user"],
)
def test_workers_are_spawned_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, before: dict[str, str], method: str | None
) -> None:
    environment = dict(before)
    monkeypatch.setattr("os.environ", environment)
    prepare_environment(gpu=gpu)
    assert environment.get("VLLM_WORKER_MULTIPROC_METHOD") == method


@pytest.mark.parametrize(("stale", "arguments"), [(True, {"enable_prefix_caching": False}), (False, {})])
def test_stale_cache_disables_prefix_caching(stale: bool, arguments: dict[str, bool]) -> None:
    found = engine_arguments(settings({}, stale=stale), gpu=True)
    assert {name: value for name, value in found.items() if "prefix" in name} == arguments


@pytest.mark.parametrize(
    ("context", "options", "enabled"),
    [(128, {}, False), (129, {}, None), (128, {"enable_prefix_caching": True}, True)],
)
def test_context_within_a_block_disables_prefix_caching(
    context: int, options: dict[str, object], enabled: bool | None
) -> None:
    found = engine_arguments(settings(options, context=context), gpu=False)
    assert found.get("enable_prefix_caching") is enabled


@pytest.mark.parametrize(
    ("gpu", "rank", "options", "backend"),
    [
        (False, 512, {}, "CPU_MLA"),
        (False, 512, {"attention_backend": "AMX_MLA"}, "AMX_MLA"),
        (False, None, {}, None),
        (True, 512, {}, None),
    ],
)
def test_latent_attention_has_the_same_kernel_on_each_cpu(
    tmp_path: Path, gpu: bool, rank: int | None, options: dict[str, object], backend: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": rank}))
    found = engine_arguments(settings(options, model=tmp_path), gpu=gpu)
    assert found.get("attention_backend") == backend


@pytest.mark.parametrize(("rank", "most"), [(1, 1), (4, 8), (16, 16), (33, 64), (512, 512)])
def test_adapter_has_a_rank_that_vllm_takes(rank: int, most: int) -> None:
    found = engine_arguments(settings({}, rank=rank), gpu=False)
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 1, most)
    assert "enable_lora" not in engine_arguments(settings({}), gpu=False)


def test_adapters_go_by_host_memory() -> None:
    assert uses_nccl(settings({}), gpu=True)
    assert not uses_nccl(settings({}, rank=4), gpu=True)


@pytest.mark.parametrize(
    ("stale", "option", "value"),
    [
        (False, "logprobs_mode", "raw_logprobs"),
        (False, "seed", 7),
        (False, "skip_tokenizer_init", False),
        (True, "enable_prefix_caching", True),
    ],
)
def test_options_that_falsify_answers_are_refused(stale: bool, option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"options\.{option}={value}: .* {option}="):
        engine_arguments(settings({option: value}, stale=stale), gpu=True)


def test_other_options_reach_vllm_unchanged() -> None:
    options = {"enable_prefix_caching": True, "logprobs_mode": "processed_logprobs", "max_num_seqs": 3, "block_size": 8}
    assert engine_arguments(settings(options), gpu=True).items() >= options.items()
