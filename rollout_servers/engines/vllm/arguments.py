"""Engine arguments and environment of vLLM. Imported before vllm, which reads some variables at import."""

import os
from typing import Any

import torch

from slipstream.configs.runtime.errors import ConfigError
from slipstream.models.architecture import has_latent_attention, takes_images
from slipstream.models.images import MOST_IMAGES
from slipstream.rollout_servers.engines.base import EngineSettings

CPU_KV_CACHE_BYTES = 1 << 30
CPU_BLOCK_TOKENS = 128
"""Tokens of a block of the KV cache on a CPU."""
WORKER_EXTENSION = "slipstream.rollout_servers.engines.vllm.worker.StagedWorker"
BACKEND = "slipstream_nccl"
"""Name of the receiver of NCCL broadcasts (`worker.CompleteNccl`) in vLLM's workers."""
ADAPTER_ID = 1
"""vLLM's id of the adapter, where there is one."""
PARALLEL_OPTIONS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Options of engines that run in several processes."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes as `max_lora_rank`."""
SERVER_VARIABLE = "SLIPSTREAM_ROLLOUT_SERVER"

_EVERYWHERE = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # The inline engine's core is in the server's process; AsyncLLM ignores this.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_ON_A_GPU = {
    # The check for a GPU has initialised CUDA, which a forked process then can't use.
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
    """True if torch sees a CUDA device."""
    return torch.cuda.is_available()


def uses_nccl(settings: EngineSettings, *, gpu: bool) -> bool:
    """True if weights may go straight into the engine's GPUs; adapters, which are small, go by host memory."""
    possible = [transport.name for transport in settings.config.weights.possible]
    return gpu and settings.config.model.lora is None and settings.config.rollout.engine.direct in possible


def prepare_environment(*, gpu: bool, return_experts: bool = False) -> None:
    """Sets vLLM's environment variables where the user has not."""
    # Only this runner returns experts, and vLLM does not choose it for all models.
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if gpu and return_experts else {}
    for name, value in {**_EVERYWHERE, **(_ON_A_GPU if gpu else _ON_A_CPU), **runner}.items():
        os.environ.setdefault(name, value)


def claim_children() -> None:
    """Makes the processes that this one starts from now on, and that call `end_with_server`, end with it."""
    os.environ[SERVER_VARIABLE] = str(os.getpid())


def engine_arguments(settings: EngineSettings, *, gpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments: plain values, by their names in EngineArgs.

    Raises: ConfigError when `rollout.engine.options` would change one that is relied on.
    """
    engine = settings.config.rollout.engine
    relied_on = _relied_on(settings)
    for option in relied_on.keys() & engine.options.keys():
        if engine.options[option] != relied_on[option]:
            raise ConfigError(
                f"rollout.engine.options.{option}={engine.options[option]}: slipstream relies on "
                f"{option}={relied_on[option]}; leave it out"
            )
    arguments: dict[str, Any] = {
        "dtype": settings.config.model.dtype_here,
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
        if has_latent_attention(settings.model):
            # On a CPU with AMX vLLM chooses another kernel, whose weights can't be float32.
            arguments["attention_backend"] = "CPU_MLA"
        if engine.max_model_len <= CPU_BLOCK_TOKENS and not settings.config.learner.router_replay:
            # Only full blocks are shared, so nothing ever is; the search for them costs a tenth of a step.
            arguments["enable_prefix_caching"] = False
    return relied_on | arguments | engine.options


def _relied_on(settings: EngineSettings) -> dict[str, Any]:
    """Arguments without which answers, log-probs or versions would be silently wrong.

    Raises: ConfigError when `learner.router_replay` and another key exclude each other.
    """
    arguments: dict[str, Any] = {
        "model": str(settings.model),
        "seed": settings.config.run.seed,
        # Token ids in, token ids out: the engine never sees text. Only its processor of images has a tokenizer.
        "skip_tokenizer_init": not takes_images(settings.model),
        # Of the distribution that was sampled; the default ignores the temperature.
        "logprobs_mode": "processed_logprobs",
        # Texts to score overtake waiting requests (SCORE_PRIORITY); all else is first come, first served.
        "scheduling_policy": "priority",
    }
    if takes_images(settings.model):
        # An update empties the cache of one process and not that of the other, which then sends only an image's hash.
        arguments["mm_processor_cache_gb"] = 0
        arguments["limit_mm_per_prompt"] = {"image": MOST_IMAGES, "video": 0}
    if settings.config.model.lora is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": min(rank for rank in _RANKS if rank >= settings.config.model.lora.rank),
            "lora_dtype": getattr(torch, settings.config.model.dtype_here),  # vLLM takes no name of float32
        }
    if settings.config.weights.keep_stale_kv:
        # Blocks computed under old weights would be shared with requests under new ones. Otherwise each update drops
        # them, and sharing computes a group's prompt once.
        arguments["enable_prefix_caching"] = False
    if settings.config.learner.router_replay:
        if settings.config.weights.keep_stale_kv:
            raise ConfigError(
                "learner.router_replay: vLLM returns experts only with prefix caching, which "
                "weights.keep_stale_kv=true turns off; set one of them to false"
            )
        arguments |= {"enable_prefix_caching": True, "enable_return_routed_experts": True}
    return arguments
