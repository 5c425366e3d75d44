"""What vLLM is started with. Import it before vllm: some settings are read at import."""

import os
from pathlib import Path
from typing import Any

import torch

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig

CPU_KV_CACHE_BYTES = 1 << 30
SCORED_FIRST = -1
"""vLLM's priority of a text that is scored: who waits for it is a whole fleet's update. Answers have 0."""
WORKER_EXTENSION = "slipstream.rollout_servers.engines.vllm.worker.StagedWorker"

_EVERYWHERE = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # The inline engine's core is in the server's process; AsyncLLM does not look at this.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_ON_A_GPU = {
    # Who looked for a GPU has called CUDA, which no forked process can use from then on.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_ON_A_CPU = {
    # Otherwise the first request compiles for 20 s, even with enforce_eager.
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
}


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def uses_nccl(config: RunConfig, *, gpu: bool) -> bool:
    """Whether weights may go straight into the engine's GPUs."""
    return gpu and config.weights.transport in ("auto", "nccl")


def prepare_environment(*, gpu: bool) -> None:
    """Sets vLLM's environment variables where the user has not."""
    for name, value in {**_EVERYWHERE, **(_ON_A_GPU if gpu else _ON_A_CPU)}.items():
        os.environ.setdefault(name, value)


def engine_arguments(config: RunConfig, model: Path, *, gpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments for this run: plain values, by their names in EngineArgs.

    Raises: ConfigError when `rollout.engine.options` would change one that is relied on.
    """
    engine = config.rollout.engine
    relied_on = _relied_on(config, model)
    for option in relied_on.keys() & engine.options.keys():
        if engine.options[option] != relied_on[option]:
            raise ConfigError(
                f"rollout.engine.options.{option}={engine.options[option]}: slipstream relies on "
                f"{option}={relied_on[option]}; leave it out"
            )
    arguments: dict[str, Any] = {
        "dtype": config.model.dtype,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_sequences,
        "disable_log_stats": True,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if engine.kv_cache_bytes is not None or not gpu:
        arguments["kv_cache_memory_bytes"] = engine.kv_cache_bytes or CPU_KV_CACHE_BYTES
    if not gpu:
        arguments["enforce_eager"] = True
        arguments["async_scheduling"] = False
    return relied_on | arguments | engine.options


def _relied_on(config: RunConfig, model: Path) -> dict[str, Any]:
    """With others the answers, or what is said of them, would be wrong without a word."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "seed": config.run.seed,
        # Token ids in, token ids out: the engine never sees text.
        "skip_tokenizer_init": True,
        # Of the distribution that was sampled from: the default ignores the temperature.
        "logprobs_mode": "processed_logprobs",
        # What is scored goes before what waits (SCORED_FIRST); all else is first come, first served as by default.
        "scheduling_policy": "priority",
    }
    if config.weights.keep_stale_kv:
        # Blocks computed under old weights would be shared with requests that run under new ones. Otherwise each update
        # forgets them, and vLLM shares them where the model allows it: a group's prompt is computed once.
        arguments["enable_prefix_caching"] = False
    return arguments
