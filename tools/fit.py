"""`slipstream fit`: GPU memory of a run by its configuration, before any GPU is rented."""

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slipstream.configs.arguments import read_run_arguments, run_parser
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.models.folder import initial_model
from slipstream.tools.cli import at_least

if TYPE_CHECKING:
    from slipstream.configs.schema.learner import ParallelConfig
    from slipstream.learner.parallel.mesh import MeshSizes
    from slipstream.tools.memory import LearnerSetting

Fits = Callable[["LearnerSetting"], bool]
UNITS: Final = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
GB: Final = 1e9
MARGIN: Final = 0.05
"""Share of a GPU that must stay free: so far may a computed sum be below the peak."""
MOST_GPUS: Final = 1024
"""Beyond which no mesh is proposed."""
WITHIN_HOST: Final = 8
"""Most ranks along `tp`: they exchange activations in every layer."""


def memory(text: str) -> float:
    """Argument type: bytes, such as 80GB or 80GiB."""
    match = re.fullmatch(r"([0-9.]+)\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"{text} is no size such as 80GB")
    return float(match[1]) * UNITS[match[2]]


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream fit`; returns 0 if learner and engine fit, else 1. Raises: ConfigError for unusable models."""
    parser = run_parser(
        "Compute the memory that each GPU needs, from the configuration alone: no weights, no GPU.",
        prog="slipstream fit",
    )
    parser.add_argument("--gpus", type=at_least(1), default=1, help="GPUs of the learner (default: 1)")
    parser.add_argument("--gpu-memory", type=memory, default=80 * GB, metavar="80GB", help="of each (default: 80GB)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
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
    """Tokens of the largest micro-batch."""
    learner: dict[str, float]
    """On each GPU of the learner."""
    host: dict[str, float]
    """On the host, for each of them."""
    engine: dict[str, float]
    """Empty without an engine: a training that is a learner alone."""
    version_bytes: float
    """Size of a version of the weights as it goes to the engines."""
    sequences: int
    """Longest sequences that the KV cache of an engine holds."""
    remedies: list[str]
    """Arguments of this command, each of which makes the learner fit; or one of all that are needed."""
    proposed: str | None
    """Arguments with a mesh on which the learner fits."""
    engine_remedy: str | None
    """An argument with which the engine fits."""

    @property
    def learner_fits(self) -> bool:
        """True if the learner leaves the margin free."""
        return fits_with_margin(sum(self.learner.values()), self.gpu_memory)

    @property
    def fits(self) -> bool:
        """True if learner and engine, if there is one, fit."""
        return self.learner_fits and (not self.engine or self.sequences > 0)

    @property
    def text(self) -> str:
        """The report as lines."""
        axes = ", ".join(f"{name} {size}" for name, size in self.mesh.items() if size > 1) or "one rank"
        count = f"{self.parameters / 1e9:.2f} B" if self.parameters >= 1e8 else f"{self.parameters / 1e6:.2f} M"
        lines = [f"{count} parameters; learner: {axes}; micro-batches of {self.tokens:,} tokens"]
        lines += [f"  {name:<26}{_amount(size)}" for name, size in self.learner.items()]
        needed = sum(self.learner.values())
        short = "TOO TIGHT" if needed <= self.gpu_memory else "DOES NOT FIT"
        verdict = "fits" if self.learner_fits else f"{short}, as {MARGIN:.0%} must stay free"
        lines.append(f"  {'each GPU of the learner':<26}{_amount(needed)} of {self.gpu_memory / GB:g} GB: {verdict}")
        lines += [f"  on the host: {name:<13}{_amount(size)}" for name, size in self.host.items()]
        if self.engine:
            lines.append("engine")
            lines += [f"  {name:<26}{_amount(size)}" for name, size in self.engine.items()]
            verdict = "fits" if self.sequences else "DOES NOT FIT"
            lines.append(f"  {'longest sequences':<26}{self.sequences:9,d} at once: {verdict}")
        lines += [f"remedy for the learner: {remedy}" for remedy in self.remedies]
        if self.proposed is not None:
            lines.append(f"a mesh that fits: {self.proposed}")
        if self.engine_remedy is not None:
            lines.append(f"remedy for the engine: {self.engine_remedy}")
        return "\n".join(lines)


def fits_with_margin(needed: float, memory: float) -> bool:
    """True if so many bytes leave `MARGIN` of the memory free."""
    return needed <= (1 - MARGIN) * memory


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
    from slipstream.tools.memory import ENGINE_WORK_BYTES, Estimator, LearnerSetting

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
        return fits_with_margin(estimator.learner(changed).gpu_bytes, gpu_bytes)

    def sequences(ranks: int) -> int:
        changed = config.rollout.engine.model_copy(
            update={"options": {**config.rollout.engine.options, "tensor_parallel_size": ranks}}
        )
        estimate = estimator.engine(changed, dtype=setting.dtype, gpu_bytes=gpu_bytes)
        return estimate.sequences(changed.max_model_len)

    # Without an engine, the longest sequence is by the budget itself.
    changes = _changes(config.rollout.engine.max_model_len if config.uses_buffer else setting.tokens)
    remedies, proposed = list[str](), None
    if not fits(setting):
        remedies = _remedies(setting, changes, fits)
        proposed = _proposed(setting, changes, model, fits, gpus=gpus, parallel=config.learner.parallel)
    held = engine.sequences(config.rollout.engine.max_model_len) if config.uses_buffer else 0
    ranks = _ranks(sequences) if config.uses_buffer and not held else None
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
            "CUDA, work": ENGINE_WORK_BYTES,
            "KV cache per 1,000 tokens": 1000 * engine.per_token,
        }
        if config.uses_buffer
        else {},
        version_bytes=estimator.version_bytes(setting),
        sequences=held,
        remedies=remedies,
        proposed=proposed,
        engine_remedy=None if ranks is None else f"rollout.engine.options.tensor_parallel_size={ranks}",
    )


def fit_apart(config: RunConfig, *, gpus: int, gpu_bytes: float) -> FitReport:
    """As `fit`, in a process of its own: torch does not stay in this one."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(fit, config, gpus=gpus, gpu_bytes=gpu_bytes).result()
    except BrokenProcessPool:
        raise ConfigError("the computation of the memory crashed; `slipstream fit` shows where") from None


Change = tuple[str, dict[str, Any]]
"""A change of the configuration, as an argument, and what it changes in the setting."""


def _changes(longest: int) -> list[Change]:
    """Changes that save memory, the cheapest first."""
    return [
        ("learner.activation_checkpointing=full", {"checkpointing": "full"}),
        (f"learner.token_budget={longest}", {"tokens": longest}),
        ("learner.optimizer.name=adamw_8bit", {"optimizer": "adamw_8bit"}),
        ("learner.offload=true", {"offload": True}),
    ]


def _effective(setting: "LearnerSetting", changes: Sequence[Change]) -> list[Change]:
    """The changes that save any memory."""
    return [
        (text, change)
        for text, change in changes
        if replace(setting, **change) != setting and change.get("tokens", 0) < setting.tokens
    ]


def _remedies(setting: "LearnerSetting", changes: Sequence[Change], fits: Fits) -> list[str]:
    """The single changes that suffice, or all that are needed together; empty if they do not suffice."""
    effective = _effective(setting, changes)
    single = [text for text, change in effective if fits(replace(setting, **change))]
    if single:
        return single
    texts = []
    for text, change in effective:
        setting = replace(setting, **change)
        texts.append(text)
        if fits(setting):
            return [" ".join(texts)]
    return []


def _proposed(
    setting: "LearnerSetting",
    changes: Sequence[Change],
    model: Any,
    fits: Fits,
    *,
    gpus: int,
    parallel: "ParallelConfig",
) -> str | None:
    """The simplest mesh of fewest GPUs, at least `gpus`, on which the learner fits without offloading.

    A simple mesh with full checkpointing and a smaller budget precedes one with more axes.
    """
    candidates = [("", setting)]
    for text, change in _effective(setting, changes[:2]):
        before, changed = candidates[-1]
        candidates.append((f"{before} {text}", replace(changed, **change)))
    while gpus <= MOST_GPUS:
        for mesh in meshes(model, gpus, adapters=setting.lora_rank is not None):
            for texts, candidate in candidates:
                if fits(replace(candidate, mesh=mesh)):
                    return f"--gpus {gpus}{_mesh_arguments(mesh, parallel)}{texts}"
        gpus *= 2
    return None


def _mesh_arguments(mesh: "MeshSizes", parallel: "ParallelConfig") -> str:
    """The keys of a mesh that the configuration does not have already, each after a space."""
    given = dict(parallel)
    # Unset, it is the number of ranks that the other axes leave.
    changed = {
        name: size
        for name, size in asdict(mesh).items()
        if size != given[name] and not (name == "dp_shard" and given[name] is None)
    }
    return "".join(f" learner.parallel.{name}={size}" for name, size in changed.items())


def _ranks(sequences: Callable[[int], int]) -> int | None:
    """The fewest GPUs of an engine, a power of two, that hold a sequence."""
    return next((ranks for ranks in (2**n for n in range(1, 7)) if sequences(ranks)), None)


def meshes(model: Any, gpus: int, *, adapters: bool = False) -> Iterator["MeshSizes"]:
    """Meshes of so many GPUs that the model can be trained on, the simplest first.

    Those of few axes precede others, and then those that communicate least; plain FSDP over all GPUs is the first.

    Args:
        model: its configuration, of transformers.
        adapters: only adapters are trained.
    """
    from slipstream.learner.parallel.mesh import MeshSizes, refuse

    powers = sorted({gpus, *(2**n for n in range(gpus.bit_length()))})
    shapes = [
        (sum(size > 1 for size in (gpus // (cp * tp * shards), cp, tp, ep)), cp * tp, ep, shards, cp)
        for tp in powers
        for cp in powers
        for shards in powers
        for ep in powers
        if tp <= WITHIN_HOST and gpus % (cp * tp * shards) == 0 and (cp * tp * shards) % ep == 0
    ]
    for _, inner, ep, shards, cp in sorted(shapes):
        mesh = MeshSizes(dp_replicate=gpus // (inner * shards), dp_shard=shards, cp=cp, tp=inner // cp, ep=ep)
        try:
            refuse(mesh, model, adapters=adapters)
        except ConfigError:
            continue
        yield mesh
