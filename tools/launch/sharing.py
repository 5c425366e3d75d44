"""Division of the memory of a GPU that the learner and an engine share, by what `slipstream fit` computes."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.rollout import EngineConfig
from slipstream.tools.fit import GB, MARGIN

if TYPE_CHECKING:
    from slipstream.tools.fit import FitReport

ENGINES_WITH_IPC: Final = ("hf",)
"""Engines that read the memory of the learner's GPU: they run in the process that receives versions."""


@dataclass(frozen=True)
class Sharing:
    """The memory of each shared GPU, in bytes, and the settings that follow."""

    gpu_bytes: float
    learner: float
    """With the versions of the weights on their way to the engine."""
    engine: float
    """With its KV cache, the version that it receives, and CUDA."""
    kv_cache: float
    transport: str
    settings: Mapping[str, Any]
    """Values of the configuration's keys that the user has left open."""

    @property
    def text(self) -> str:
        """The division as a line."""
        free = self.gpu_bytes - self.learner - self.engine
        return (
            f"of {self.gpu_bytes / GB:.1f} GB: learner {self.learner / GB:.1f}, engine {self.engine / GB:.1f} with "
            f"{self.kv_cache / GB:.1f} of KV cache, free {free / GB:.1f}; weights by {self.transport}"
        )

    def as_record(self) -> dict[str, Any]:
        """The division as `summary.json` keeps it."""
        sizes = {"gpu": self.gpu_bytes, "learner": self.learner, "engine": self.engine, "kv_cache": self.kv_cache}
        return {"bytes": {name: round(size) for name, size in sizes.items()}, "transport": self.transport}


def share_memory(config: RunConfig, report: "FitReport", *, same_gpu: bool) -> Sharing:
    """Divides the memory: the learner gets what it needs, the KV cache all that is left and of use.

    Args:
        same_gpu: every engine has the one GPU of the learner's first rank.

    Raises: ConfigError with the numbers when both don't fit.
    """
    engine, option = config.rollout.engine, _share_option(config.rollout.engine)
    ipc = same_gpu and engine.name in ENGINES_WITH_IPC
    transport = ("ipc" if ipc else "shm") if config.weights.transport == "auto" else config.weights.transport
    # Two versions take turns where the engine reads them on the GPU; else one is on its way to the host.
    learner = {**report.learner, "versions": report.version_bytes * (2 if transport == "ipc" else 1)}
    fixed = {name: report.engine[name] for name in ("weights", "CUDA, work")}
    if transport == "ipc":
        fixed["received version"] = report.version_bytes
    room = (1 - MARGIN) * report.gpu_memory - sum(learner.values())
    given = engine.options.get(option)
    fraction = None if given is None or engine.name == "sglang" else float(given)
    engine_bytes = room if fraction is None else fraction * report.gpu_memory
    available = engine_bytes - sum(fixed.values())
    sequence = report.engine["KV cache per 1,000 tokens"] * engine.max_model_len / 1000
    cache = float(engine.kv_cache_bytes or max(sequence, min(available, sequence * engine.max_sequences)))
    if engine_bytes > room or cache > available:
        raise ConfigError(_refusal(report, engine, learner, {**fixed, "KV cache": cache}))
    if fraction is None:
        engine_bytes = sum(fixed.values()) + cache
        if engine.name == "hf":  # a limit of its allocator, which nothing reserves: of what is left, half for each
            engine_bytes = (engine_bytes + room) / 2
    if given is None:
        # Of SGLang a share of what is free at its start, for weights and cache; kv_cache_bytes bounds the latter.
        is_static = engine.name == "sglang"
        part, whole = (fixed["weights"] + cache, engine_bytes) if is_static else (engine_bytes, report.gpu_memory)
        given = ceil(1000 * part / whole) / 1000
    settings = {
        "weights.transport": transport,
        f"rollout.engine.options.{option}": given,
        "rollout.engine.kv_cache_bytes": int(cache),
    }
    return Sharing(report.gpu_memory, sum(learner.values()), engine_bytes, cache, transport, settings)


def _share_option(engine: EngineConfig) -> str:
    """Option with the engine's share of a GPU's memory; of vLLM it must be free at its start."""
    return "mem_fraction_static" if engine.name == "sglang" else "gpu_memory_utilization"


def _refusal(
    report: "FitReport", engine: EngineConfig, learner: Mapping[str, float], fewest: Mapping[str, float]
) -> list[str]:
    option = _share_option(engine)
    given = engine.options.get(option)
    within = ""
    if given is not None:
        gigabytes = float(given) * report.gpu_memory / GB
        within = f" (rollout.engine.options.{option}={given} are {gigabytes:.1f} GB: leave it out to have it computed)"
    cached = f"{engine.kv_cache_bytes:,} bytes" if engine.kv_cache_bytes else f"{engine.max_model_len} tokens"
    remedies = [*report.remedies[:1], "a smaller learner.token_budget or rollout.engine.max_model_len", "two GPUs"]
    return [
        f"learner and engine share a GPU of {report.gpu_memory / GB:.1f} GB, of which {MARGIN:.0%} must stay free. The "
        f"learner needs {_sum(learner)}; the engine at least {_sum(fewest)}, with a KV cache of {cached}{within}: "
        + ", or ".join(remedies)
    ]


def _sum(parts: Mapping[str, float]) -> str:
    listed = ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items() if size >= 0.05 * GB)
    return f"{sum(parts.values()) / GB:.1f} GB ({listed})"
