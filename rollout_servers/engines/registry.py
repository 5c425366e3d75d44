"""Starts the engine that the configuration asks for."""

from importlib import import_module
from pathlib import Path
from typing import Any

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.signals import heavy_imports
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import Engine, Generation
from slipstream.rollout_servers.engines.vllm.arguments import has_gpu, prepare_environment

_ENGINES = "slipstream.rollout_servers.engines."
CLASSES = {
    "vllm/inline": ("vllm.inline", "InlineEngine"),
    "vllm/process": ("vllm.process", "ProcessEngine"),
    "hf": ("hf.engine", "HfEngine"),
    "sglang": ("sglang.engine", "SglangEngine"),
}
"""Where each engine is; each has `async start(config, model, generation)`."""


async def start_engine(config: RunConfig, model: Path, *, eos_token_ids: tuple[int, ...]) -> Engine:
    """The running engine, with the weights of `model` as version 0.

    Raises: ConfigError when parts of the configuration don't fit together, EngineError when the engine does not start
    in `rollout.engine.start_deadline_s`.
    """
    name: str = config.rollout.engine.name
    if name == "vllm":
        name = f"vllm/{config.rollout.engine.core}"
        prepare_environment(gpu=has_gpu())
    if config.weights.transport == "nccl" and config.rollout.engine.nccl is None:
        raise ConfigError(
            f"weights.transport=nccl goes into engine vllm/process and into sglang only, not into {name}; "
            "set rollout.engine.name=vllm and rollout.engine.core=process, or weights.transport=auto"
        )
    module, engine = CLASSES[name]
    # Imported here: vLLM reads its environment at import, and takes seconds.
    try:
        with heavy_imports():
            kind: Any = getattr(import_module(_ENGINES + module), engine)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ConfigError(
            "rollout.engine.name=vllm, but there is no vLLM here: install slipstream[vllm] for GPUs, or for a CPU as "
            "`make setup` does; or set rollout.engine.name=hf"
        ) from None
    started: Engine = await kind.start(config, model, _generation(config, eos_token_ids))
    return started


def _generation(config: RunConfig, eos_token_ids: tuple[int, ...]) -> Generation:
    sampling = config.rollout.sampling
    return Generation(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=() if sampling.ignore_eos else eos_token_ids,
    )
