"""What SGLang's server is started with. Names and meanings as of SGLang 0.5.23."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.sglang.protocol import INFO
from slipstream.rollout_servers.engines.sglang.server import Command, command_line_flags, server_command

CPU_KV_CACHE_BYTES = 1 << 30
CONTEXT_MARGIN = 6
"""SGLang ends answers 2 tokens before its context length, silently, and refuses prompts of all but 6 of its tokens."""
_REPLICAS = ("dp", "dp_size", "data_parallel_size", "attn_dp_size", "attention_data_parallel_size")
_IMPORT_S = 60.0
_FIND_SGLANG = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"


def check_settings(config: RunConfig) -> None:
    """Raises: ConfigError for what SGLang can't do."""
    if config.weights.keep_stale_kv:
        raise ConfigError(
            "weights.keep_stale_kv=true: SGLang would share prefixes that were computed under the old weights with new "
            "requests too, whose log-probs would be of no version; set it to false, or rollout.engine.name=vllm"
        )
    require_one(
        config,
        _REPLICAS,
        "SGLang gives all replicas the same random numbers, so answers to one prompt would be copies of one another; "
        "start more rollout servers instead",
    )


def require_one(config: RunConfig, options: Sequence[str], reason: str) -> None:
    """Raises: ConfigError when an option of one of these names asks for more than one."""
    for option, value in config.rollout.engine.options.items():
        if option.replace("-", "_") in options and str(value) not in ("1", "None"):
            raise ConfigError(f"rollout.engine.options.{option}={value}: {reason}")


async def interpreter(config: RunConfig) -> str:
    """The Python that SGLang is installed for. Raises: ConfigError when it isn't, or there is none."""
    python = str(config.rollout.engine.python or sys.executable)
    setting = f"rollout.engine.python={config.rollout.engine.python}"
    try:
        found = await asyncio.to_thread(
            subprocess.run, [python, "-I", "-c", _FIND_SGLANG], timeout=_IMPORT_S, check=False, capture_output=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{setting} can't be run: {error}") from None
    if found.returncode != 0:
        raise ConfigError(
            f"{setting}: sglang is not installed for {python}; name the interpreter of an environment that has it"
        )
    return python


def start_command(config: RunConfig, model: Path, architecture: PretrainedConfig, *, python: str, gpu: bool) -> Command:
    """How SGLang's server is started. Raises: EngineError when its port is taken."""
    arguments = server_arguments(config, model, architecture, gpu=gpu)
    return server_command(
        config,
        name="SGLang's server",
        python=python,
        module="sglang.launch_server",
        flags=command_line_flags(arguments),
        environment=server_environment(gpu=gpu),
        # Not /health: that hangs while generation is paused.
        health=INFO,
    )


def server_arguments(config: RunConfig, model: Path, architecture: PretrainedConfig, *, gpu: bool) -> dict[str, Any]:
    """SGLang's server arguments for this run: plain values, by their names in ServerArgs."""
    engine = config.rollout.engine
    arguments: dict[str, Any] = {
        "model_path": str(model),
        "dtype": config.model.dtype,
        "random_seed": config.run.seed,
        "context_length": engine.max_model_len + CONTEXT_MARGIN,
        "max_running_requests": engine.max_sequences,
        "weight_version": "0",
        # Token ids in, token ids out: the server never sees text.
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        # An event holds what is new; otherwise each repeats all that came before.
        "incremental_streaming_output": True,
        "sleep_on_idle": True,
        "log_level": "warning",
    }
    if engine.kv_cache_bytes is not None or not gpu:
        cache_bytes = engine.kv_cache_bytes or CPU_KV_CACHE_BYTES
        arguments["max_total_tokens"] = cache_bytes // _token_bytes(architecture, config.model.dtype)
    if not gpu:
        arguments |= {"device": "cpu", "attention_backend": "torch_native"}
    return arguments | engine.options


def server_environment(*, gpu: bool) -> dict[str, str]:
    """What is added to the server's environment."""
    everywhere = {
        "HF_HUB_OFFLINE": "1",
        # For the margin.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Log-probs are of the distribution that was sampled: with it they would be those before the temperature.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
    }
    if gpu:
        return everywhere
    return everywhere | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def _token_bytes(architecture: PretrainedConfig, dtype: str) -> int:
    """KV-cache bytes of a token, with plain attention."""
    heads = architecture.num_attention_heads
    kv_heads = getattr(architecture, "num_key_value_heads", None) or heads
    head_dim = getattr(architecture, "head_dim", None) or architecture.hidden_size // heads
    item_bytes = getattr(torch, dtype).itemsize
    return int(2 * architecture.num_hidden_layers * kv_heads * head_dim * item_bytes)
