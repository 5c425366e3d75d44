"""`slipstream fit`: GPU memory of a run by its configuration, before any GPU is rented."""

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slipstream.configs.arguments import read_run_arguments, run_parser
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.models.folder import initial_model
from slipstream.tools.cli import at_least

if TYPE_CHECKING:
    from slipstream.learner.parallel.mesh import MeshSizes
    from slipstream.tools.memory import LearnerSetting

Fits = Callable[["LearnerSetting"], bool]
UNITS: Final = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
GB: Final = 1e9
MOST_GPUS: Final = 1024
"""Beyond which no mesh is proposed."""
WITHIN_HOST: Final = 8
"""Most ranks along `tp`: they exchange activations in every layer."""


def memory(text: str) -> float:
    """Argument type: bytes, such as 80GB or 80GiB."""
    found = re.fullmatch(r"([0-9.]+)\s*([A-Z]*)", text.strip().upper())
    if found is None or found[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"{text} is no size such as 80GB")
    return float(found[1]) * UNITS[found[2]]


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream fit`; returns 0 if learner and engine fit, else 1. Raises: ConfigError for unusable models."""
    parser = run_parser(
        "Compute the memory that each GPU needs, from the configuration alone: no weights, no GPU.",
        prog="slipstream fit",
    )
    parser.add_argument("--gpus", type=at_least(1), default=1, help="GPUs of the learner (default: 1)")
    parser.add_argument("--gpu-memory", type=memory, default=80 * GB, metavar="80GB", help="of each (default: 80GB)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments, config = read_run_arguments(parser, argv)
    report = fit(config, gpus=arguments.gpus, gpu_bytes=arguments.gpu_memory)
    print(json.dumps(asdict(report), indent=2) if arguments.json else report.text)
    return 0 if report.fits else 1


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """Memory by purpose, in bytes."""

    parameters: int
    gpu_memory: float
    mesh: dict[str, int]
    tokens: int
    """Of the largest micro-batch."""
    learner: dict[str, float]
    """On each GPU of the learner."""
    host: dict[str, float]
    """On the host, for each of them."""
    engine: dict[str, float]
    sequences: int
    """Longest sequences that the KV cache of an engine holds."""
    remedies: list[str]
    """Changes, each of which makes the learner fit; or one list of all that are needed."""
    proposed: str | None
    """A mesh on which the learner fits."""

    @property
    def fits(self) -> bool:
        """True if learner and engine fit."""
        return sum(self.learner.values()) <= self.gpu_memory and self.sequences > 0

    @property
    def text(self) -> str:
        """The report as lines."""
        axes = ", ".join(f"{name} {size}" for name, size in self.mesh.items() if size > 1) or "one rank"
        count = f"{self.parameters / 1e9:.2f} B" if self.parameters >= 1e8 else f"{self.parameters / 1e6:.2f} M"
        lines = [f"{count} parameters; learner: {axes}; micro-batches of {self.tokens:,} tokens"]
        lines += [f"  {name:<26}{_amount(size)}" for name, size in self.learner.items()]
        needed = sum(self.learner.values())
        verdict = "fits" if needed <= self.gpu_memory else "DOES NOT FIT"
        lines.append(f"  {'each GPU of the learner':<26}{_amount(needed)} of {self.gpu_memory / GB:g} GB: {verdict}")
        lines += [f"  on the host: {name:<13}{_amount(size)}" for name, size in self.host.items()]
        lines.append("engine")
        lines += [f"  {name:<26}{_amount(size)}" for name, size in self.engine.items()]
        verdict = "fits" if self.sequences else "DOES NOT FIT: raise rollout.engine.options.tensor_parallel_size"
        lines.append(f"  {'longest sequences':<26}{self.sequences:9,d} at once: {verdict}")
        lines += [f"remedy: {remedy}" for remedy in self.remedies]
        if self.proposed is not None:
            lines.append(f"a mesh that fits: {self.proposed}")
        return "\n".join(lines)


def _amount(size: float) -> str:
    """Bytes as a column of nine characters and a unit: tiny models take megabytes."""
    return f"{size / GB:9.2f} GB" if abs(size) >= 1e7 else f"{size / 1e6:9.2f} MB"


def fit(config: RunConfig, *, gpus: int, gpu_bytes: float) -> FitReport:
    """The memory of a run on `gpus` GPUs of the learner. Raises: ConfigError for unusable models and meshes."""
    # Imported here: torch takes seconds, and mistakes in the configuration are reported before.
    from transformers import AutoConfig

    from slipstream.learner.models.footprint import model_size
    from slipstream.learner.models.packing_check import as_config_error
    from slipstream.learner.parallel.mesh import MeshSizes, refuse
    from slipstream.models.folder import without_remote_code
    from slipstream.tools.memory import Estimator, LearnerSetting, longest_sequence

    with tempfile.TemporaryDirectory() as folder:  # a built model must not leave a run's folder
        path = initial_model(config.model_copy(update={"run": config.run.model_copy(update={"dir": Path(folder)})}))
        with as_config_error(str(path)), without_remote_code(path):
            model = AutoConfig.from_pretrained(path, trust_remote_code=False)
    setting = LearnerSetting.of(config, MeshSizes.of(config.learner.parallel, ranks=gpus))
    refuse(setting.mesh, model, adapters=setting.lora_rank is not None)
    with as_config_error(str(path)):  # a model of another kind may raise anything
        estimator = Estimator(model_size(model), model)
        learner = estimator.learner(setting)
    engine = estimator.engine(config.rollout.engine, dtype=setting.dtype, gpu_bytes=gpu_bytes)

    def fits(changed: LearnerSetting) -> bool:
        return estimator.learner(changed).gpu_bytes <= gpu_bytes

    changes = _changes(longest_sequence(config))
    remedies, proposed = list[str](), None
    if learner.gpu_bytes > gpu_bytes:
        remedies = _remedies(setting, changes, fits)
        proposed = _proposed(setting, changes, model, fits, gpus=gpus)
    return FitReport(
        parameters=estimator.size.total,
        gpu_memory=gpu_bytes,
        mesh=asdict(setting.mesh),
        tokens=setting.tokens,
        learner=dict(learner.gpu),
        host=dict(learner.host),
        engine={
            "weights": engine.weights,
            "KV cache": engine.cache,
            "KV cache per 1,000 tokens": 1000 * engine.per_token,
        },
        sequences=engine.sequences(config.rollout.engine.max_model_len),
        remedies=remedies,
        proposed=proposed,
    )


Change = tuple[str, dict[str, Any]]
"""A change of the configuration, and what it changes in the setting."""


def _changes(longest: int) -> list[Change]:
    """Changes that save memory, the cheapest first."""
    return [
        ("learner.activation_checkpointing: full", {"checkpointing": "full"}),
        (f"learner.token_budget: {longest}, the longest sequence", {"tokens": longest}),
        ("learner.optimizer.name: adamw_8bit", {"optimizer": "adamw_8bit"}),
        ("learner.offload: true", {"offload": True}),
    ]


def _remedies(setting: "LearnerSetting", changes: Sequence[Change], fits: Fits) -> list[str]:
    """Texts of the single changes that suffice, or of all that are needed together; empty if they do not suffice."""
    effective = [(text, change) for text, change in changes if replace(setting, **change) != setting]
    single = [text for text, change in effective if fits(replace(setting, **change))]
    if single:
        return single
    texts = []
    for text, change in effective:
        setting = replace(setting, **change)
        texts.append(text)
        if fits(setting):
            return [", ".join(texts)]
    return []


def _proposed(setting: "LearnerSetting", changes: Sequence[Change], model: Any, fits: Fits, *, gpus: int) -> str | None:
    """The mesh of fewest GPUs, at least `gpus`, on which the learner fits without offloading."""
    least = replace(setting, **{name: value for _, change in changes[:2] for name, value in change.items()})
    while gpus <= MOST_GPUS:
        for candidate, suffix in ((setting, ""), (least, f", with {changes[0][0]}, {changes[1][0]}")):
            for mesh in meshes(model, gpus, adapters=setting.lora_rank is not None):
                if fits(replace(candidate, mesh=mesh)):
                    axes = ", ".join(f"{name}: {size}" for name, size in asdict(mesh).items() if size > 1)
                    return f"{gpus} GPUs, learner.parallel={{{axes}}}{suffix}"
        gpus *= 2
    return None


def meshes(model: Any, gpus: int, *, adapters: bool = False) -> Iterator["MeshSizes"]:
    """Meshes of so many GPUs that the model can be trained on; those that communicate least come first.

    Args:
        model: its configuration, of transformers.
        adapters: only adapters are trained.
    """
    from slipstream.learner.parallel.mesh import MeshSizes, refuse

    powers = [2**n for n in range(gpus.bit_length())]
    shapes = [
        (cp * tp, ep, shards, cp)
        for tp in powers
        for cp in powers
        for shards in powers
        for ep in powers
        if tp <= WITHIN_HOST and gpus % (cp * tp * shards) == 0 and (cp * tp * shards) % ep == 0
    ]
    for inner, ep, shards, cp in sorted(shapes):
        mesh = MeshSizes(dp_replicate=gpus // (inner * shards), dp_shard=shards, cp=cp, tp=inner // cp, ep=ep)
        try:
            refuse(mesh, model, adapters=adapters)
        except ConfigError:
            continue
        yield mesh
