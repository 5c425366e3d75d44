"""Starts the engine that the configuration names."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from slipstream.configs.registry import Registry
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.signals import heavy_imports
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.rollout import EngineConfig
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.models.architecture import takes_images
from slipstream.rollout_servers.engines.base import Engine, EngineSettings
from slipstream.rollout_servers.engines.vllm.arguments import PARALLEL_OPTIONS, has_gpu, prepare_environment

log = get_log("rollout.engine")

ENGINES: Final = Registry(
    "engine",
    {
        "vllm/inline": "slipstream.rollout_servers.engines.vllm.inline:InlineEngine",
        "vllm/process": "slipstream.rollout_servers.engines.vllm.process:ProcessEngine",
        "hf": "slipstream.rollout_servers.engines.hf.engine:HfEngine",
        "sglang": "slipstream.rollout_servers.engines.sglang.engine:SglangEngine",
    },
)
"""Classes with `async start(settings)`, by `rollout.engine.name` or, for vLLM, `name/core`."""


async def start_engine(config: RunConfig, model: Path, *, eos_token_ids: tuple[int, ...]) -> Engine:
    """The running engine, with the weights of `model` as version 0.

    Raises: ConfigError when parts of the configuration don't fit together, EngineError when the engine does not start
    in `rollout.engine.start_deadline_s`.
    """
    if problems := engine_problems(config.rollout.engine, config.weights, model):
        raise ConfigError(problems)
    if config.rollout.engine.name == "hf" and config.learner.router_replay:
        log.warning("engine returns no experts: learner.router_replay has no effect on its answers", engine="hf")
    started: Engine = await engine_class(config).start(EngineSettings(config, model, eos_token_ids))
    return started


def engine_class(config: RunConfig) -> Any:
    """The class of the configured engine; its import takes seconds. Raises: ImportError."""
    name: str = config.rollout.engine.name
    if name == "vllm":
        name = f"vllm/{resolved_core(config.rollout.engine, config.weights, gpu=has_gpu())}"
        prepare_environment(gpu=has_gpu(), return_experts=config.learner.router_replay)
    # Imported here: vLLM reads its environment at import.
    with heavy_imports():
        return ENGINES.load(name)


def resolved_core(engine: EngineConfig, weights: WeightsConfig, *, gpu: bool) -> str:
    """`rollout.engine.core`, resolved for this host."""
    if engine.core != "auto":
        return engine.core
    several = any(engine.options.get(option, 1) > 1 for option in PARALLEL_OPTIONS)
    return "process" if gpu or several or weights.direct else "inline"


def engine_problems(engine: EngineConfig, weights: WeightsConfig, model: Path) -> list[str]:
    """Reasons why the engine can't serve the model, found without starting it."""
    problems = list[str]()
    if engine.name != "vllm" and takes_images(model):
        problems.append(f"rollout.engine.name={engine.name} passes no images to {model}; set rollout.engine.name=vllm")
    if weights.direct and engine.direct is None:
        chosen = f"vllm/{engine.core}" if engine.name == "vllm" else engine.name
        engines = " and ".join(str(transport.engine) for transport in weights.possible)
        problems.append(
            f"weights.transport={weights.transport} goes into {engines} only, not into {chosen}; "
            "set rollout.engine.name and rollout.engine.core, or weights.transport=auto"
        )
    if engine.name == "vllm" and find_spec("vllm") is None:
        problems.append(
            "rollout.engine.name=vllm, but there is no vLLM here: install slipstream[vllm] for GPUs, or for a CPU as "
            "`make setup` does; or set rollout.engine.name=hf"
        )
    return problems
