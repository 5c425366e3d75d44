"""What SGLang's server is started with, and what is refused before it is started."""

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import EngineError, EngineSettings
from slipstream.rollout_servers.engines.sglang.arguments import (
    check_settings,
    command_line_flags,
    free_port,
    interpreter,
    server_arguments,
    server_environment,
    start_command,
)

MODEL = Path("/a/model")
ARCHITECTURE = Qwen3Config(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=32)


def settings(
    engine: dict[str, Any] | None = None, *, lora: dict[str, Any] | None = None, **weights: object
) -> EngineSettings:
    config = RunConfig.model_validate(
        {
            "run": {"seed": 7, "dir": "/runs", "name": "a-run"},
            "model": {"path": MODEL, "dtype": "float32", "lora": lora},
            "rollout": {"engine": {"name": "sglang", "max_model_len": 4096, **(engine or {})}},
            "weights": weights,
        }
    )
    return EngineSettings(config, MODEL, eos_token_ids=(1,))


def arguments(*, gpu: bool, **engine: object) -> dict[str, Any]:
    return server_arguments(settings(engine), ARCHITECTURE, gpu=gpu)


def test_context_has_a_margin() -> None:
    assert arguments(gpu=True)["context_length"] == 4102


def test_cache_size_is_given_in_tokens() -> None:
    assert arguments(gpu=False, kv_cache_bytes=4 << 20)["max_total_tokens"] == 8192
    assert arguments(gpu=False)["max_total_tokens"] == (1 << 30) // 512
    assert "max_total_tokens" not in arguments(gpu=True)
    assert arguments(gpu=True, kv_cache_bytes=4 << 20)["max_total_tokens"] == 8192


def test_options_replace_our_arguments() -> None:
    given = arguments(gpu=False, options={"tp_size": 2, "max_running_requests": 9})
    assert (given["tp_size"], given["max_running_requests"], given["random_seed"]) == (2, 9, 7)


def test_false_option_omits_its_flag() -> None:
    started = start_command(
        settings({"options": {"sleep_on_idle": False}}), ARCHITECTURE, python="/a/python", gpu=False
    )
    assert started.arguments[:3] == ["/a/python", "-m", "sglang.launch_server"]
    assert "--skip-tokenizer-init" in started.arguments
    assert not [flag for flag in started.arguments if "sleep-on-idle" in flag]


@pytest.mark.parametrize(
    ("lora", "targets"), [({"rank": 8}, ["all"]), ({"rank": 8, "targets": ["q_proj", "v_proj"]}, ("q_proj", "v_proj"))]
)
def test_adapters_have_room_beside_those_before(lora: dict[str, Any], targets: Sequence[str]) -> None:
    given = server_arguments(settings(lora=lora), ARCHITECTURE, gpu=True)
    assert (given["enable_lora"], given["max_lora_rank"], given["lora_target_modules"]) == (True, 8, targets)
    assert given["max_loras_per_batch"] == given["max_loaded_loras"] == 2
    assert "enable_lora" not in arguments(gpu=True)


def test_cpu_is_configured_without_a_gpu() -> None:
    assert server_environment(gpu=False)["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(gpu=True)
    assert arguments(gpu=False)["device"] == "cpu"
    assert arguments(gpu=True).keys().isdisjoint({"device", "attention_backend"})


def test_stale_cache_is_refused() -> None:
    check_settings(settings())
    with pytest.raises(ConfigError, match=r"weights\.keep_stale_kv=true"):
        check_settings(settings(keep_stale_kv=True))


@pytest.mark.parametrize("option", ["dp_size", "dp-size", "data_parallel_size", "attn_dp_size"])
def test_replicas_are_refused(option: str) -> None:
    check_settings(settings({"options": {option: 1, "tp_size": 2}}))
    with pytest.raises(ConfigError, match=rf"options\.{option}=2: .* start more rollout servers"):
        check_settings(settings({"options": {option: 2}}))


async def test_interpreter_without_sglang_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.python=.*sglang is not installed"):
        await interpreter(Path(sys.executable))
    with pytest.raises(ConfigError, match=r"rollout\.engine\.python=/no/python can't be run"):
        await interpreter(Path("/no/python"))


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ({"tensor_parallel_size": 2}, ["--tensor-parallel-size", "2"]),
        (
            {"gpu_memory_utilization": 0.8, "model": "/a model"},
            ["--gpu-memory-utilization", "0.8", "--model", "/a model"],
        ),
        ({"hf_overrides": {"rope_theta": 1e6}}, ["--hf-overrides", '{"rope_theta": 1000000.0}']),
        ({"middleware": ["a", "b"]}, ["--middleware", "a", "b"]),
        ({"cuda_graph_bs_decode": (1, 2)}, ["--cuda-graph-bs-decode", "1", "2"]),
        ({"quantization": None, "enable_metrics": False}, []),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"seed": 0}, ["--seed", "0"]),
    ],
)
def test_argument_becomes_flag_of_its_kind(arguments: dict[str, Any], flags: list[str]) -> None:
    assert command_line_flags(arguments) == flags


def test_server_listens_on_loopback_whatever_its_options() -> None:
    started = start_command(
        settings({"options": {"host": "0.0.0.0", "port": 1}}), ARCHITECTURE, python="/a/python", gpu=True
    )
    assert started.arguments[-4:] == ["--host", "127.0.0.1", "--port", str(started.port)], "the last of two counts"
    assert started.console.parent == Path("/runs/a-run/logs")
    assert started.console.name.endswith(f"-{started.port}.engine.console"), "no other engine of this host has the port"


def test_ports_with_a_listener_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr("random.sample", lambda *_: [port])
        with pytest.raises(EngineError):
            free_port()
    assert free_port() == port
