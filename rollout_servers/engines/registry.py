"""Starts the engine that the configuration names."""

from importlib import import_module
from pathlib import Path
from typing import Any

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.signals import heavy_imports
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import Engine, EngineSettings, refuse_images
from slipstream.rollout_servers.engines.vllm.arguments import has_gpu, prepare_environment

log = get_log("rollout.engine")

_ENGINES = "slipstream.rollout_servers.engines."
CLASSES = {
    "vllm/inline": ("vllm.inline", "InlineEngine"),
    "vllm/process": ("vllm.process", "ProcessEngine"),
    "hf": ("hf.engine", "HfEngine"),
    "sglang": ("sglang.engine", "SglangEngine"),
}
"""Module and class of each engine; each class has `async start(settings)`."""


async def start_engine(config: RunConfig, model: Path, *, eos_token_ids: tuple[int, ...]) -> Engine:
    """The running engine, with the weights of `model` as version 0.

    Raises: ConfigError when parts of the configuration don't fit together, EngineError when the engine does not start
    in `rollout.engine.start_deadline_s`.
    """
    settings = EngineSettings.from_config(config, model, eos_token_ids=eos_token_ids)
    name: str = settings.engine.name
    if name == "vllm":
        name = f"vllm/{settings.engine.core}"
        prepare_environment(gpu=has_gpu(), return_experts=settings.return_experts)
    else:
        refuse_images(name, model)
    if name == "hf" and settings.return_experts:
        log.warning("engine returns no experts: learner.router_replay has no effect on its answers", engine=name)
    if settings.weights.transport == "nccl" and settings.engine.nccl is None:
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
    started: Engine = await kind.start(settings)
    return started
