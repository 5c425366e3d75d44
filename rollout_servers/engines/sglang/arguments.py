"""Command line of SGLang's server. Names and meanings as of SGLang 0.5.23."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import EngineError, EngineSettings

INFO = "/server_info"
"""Path of the server's settings; also of its health."""
CPU_KV_CACHE_BYTES = 1 << 30
CONTEXT_MARGIN = 6
"""SGLang ends answers 2 tokens before its context length, silently, and refuses prompts of all but 6 of its tokens."""
_REPLICAS = ("dp", "dp_size", "data_parallel_size", "attn_dp_size", "attention_data_parallel_size")
_IMPORT_S = 60.0
_FIND_SGLANG = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"


def check_settings(settings: EngineSettings) -> None:
    """Raises: ConfigError for settings that SGLang does not support."""
    if settings.config.weights.keep_stale_kv:
        raise ConfigError(
            "weights.keep_stale_kv=true: SGLang would share prefixes computed under the old weights with new requests, "
            "whose log-probs would belong to no version; set it to false, or rollout.engine.name=vllm"
        )
    require_one(
        settings,
        _REPLICAS,
        "SGLang gives all replicas the same random numbers, so answers to one prompt would be copies of one another; "
        "start more rollout servers instead",
    )


def require_one(settings: EngineSettings, options: Sequence[str], reason: str) -> None:
    """Raises: ConfigError when an option of one of these names asks for more than one."""
    for option, value in settings.config.rollout.engine.options.items():
        if option.replace("-", "_") in options and str(value) not in ("1", "None"):
            raise ConfigError(f"rollout.engine.options.{option}={value}: {reason}")


async def interpreter(configured: Path | None) -> str:
    """The Python of SGLang's environment. Raises: ConfigError when it can't be run or has no SGLang."""
    python = str(configured or sys.executable)
    setting = f"rollout.engine.python={configured}"
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


@dataclass(frozen=True)
class Command:
    """Command line of a server.

    Attributes:
        name: the server in errors.
        arguments: the command line, without a shell.
        environment: variables added to this process's own.
        port: its port on loopback.
        health: the path that answers with success once it is ready.
        console: the file to which its output is appended.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    port: int
    health: str
    console: Path


def start_command(settings: EngineSettings, architecture: PretrainedConfig, *, python: str, gpu: bool) -> Command:
    """Command line of SGLang's server; its console is in the run's folder for logs.

    Raises: EngineError when no port is free.
    """
    port = free_port()
    flags = command_line_flags(server_arguments(settings, architecture, gpu=gpu))
    return Command(
        name="SGLang's server",
        arguments=[python, "-m", "sglang.launch_server", *flags, "--host", "127.0.0.1", "--port", str(port)],
        environment=server_environment(gpu=gpu),
        port=port,
        # Not /health, which hangs while generation is paused.
        health=INFO,
        console=settings.config.paths.logs / f"rollout-{socket.gethostname()}-{os.getpid()}-{port}.engine.console",
    )


def server_arguments(settings: EngineSettings, architecture: PretrainedConfig, *, gpu: bool) -> dict[str, Any]:
    """SGLang's server arguments: plain values, by their names in ServerArgs."""
    engine = settings.config.rollout.engine
    arguments: dict[str, Any] = {
        "model_path": str(settings.model),
        "dtype": settings.config.model.dtype_here,
        "random_seed": settings.config.run.seed,
        "context_length": engine.max_model_len + CONTEXT_MARGIN,
        "max_running_requests": engine.max_sequences,
        "weight_version": "0",
        # Token ids in, token ids out: the server never sees text.
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        # An event holds new tokens only; otherwise each repeats all earlier ones.
        "incremental_streaming_output": True,
        "sleep_on_idle": True,
        "log_level": "warning",
    }
    if settings.config.model.lora is not None:
        targets = settings.config.model.lora.targets
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": settings.config.model.lora.rank,
            "lora_target_modules": ["all"] if isinstance(targets, str) else targets,
            # The one before, until its requests have ended.
            "max_loras_per_batch": 2,
            "max_loaded_loras": 2,
        }
        if not gpu:
            arguments["lora_backend"] = "torch_native"
    if settings.config.learner.router_replay:
        arguments["enable_return_routed_experts"] = True
    if engine.kv_cache_bytes is not None or not gpu:
        cache_bytes = engine.kv_cache_bytes or CPU_KV_CACHE_BYTES
        arguments["max_total_tokens"] = cache_bytes // _token_bytes(architecture, settings.config.model.dtype_here)
    if not gpu:
        arguments |= {"device": "cpu", "attention_backend": "torch_native"}
    return arguments | engine.options


def server_environment(*, gpu: bool) -> dict[str, str]:
    """Variables added to the server's environment."""
    everywhere = {
        "HF_HUB_OFFLINE": "1",
        # For CONTEXT_MARGIN.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Log-probs of the distribution that was sampled, not of that before the temperature.
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


def command_line_flags(arguments: Mapping[str, Any]) -> list[str]:
    """`{"tensor_parallel_size": 2}` as `--tensor-parallel-size 2`.

    A mapping is JSON, a sequence several words, True the flag alone; None and False leave the flag out.
    """
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is not None and value is not False:
            flags += [f"--{flag}", *_words(value)]
    return flags


def free_port() -> int:
    """A random loopback port without a listener: the health of another server must not be taken for this one's.

    It is below the range that the kernel takes ports for outgoing connections from, because one of those could take it
    before the server listens on it; at random, so that servers that start at the same time differ.

    Raises: EngineError when none of a hundred is free.
    """
    for port in random.sample(range(15_000, 32_000), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise EngineError("no port from 15000 to 31999 is free on loopback for the engine's server")


def _words(value: Any) -> list[str]:
    if value is True:
        return []
    if isinstance(value, Mapping):
        return [json.dumps(value)]
    return [str(word) for word in (value if isinstance(value, list | tuple) else [value])]
