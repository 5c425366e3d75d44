"""Speed of the whole system by bound of staleness, beside the limit of overlapping phases; `--trl`: `pipeline_trl`.

Generator and learner have a core each; buffer and Redis run on the learner's. In the synchronous run the phases
alternate: a step takes G (the learner waits for groups) + T (it trains and publishes). Phases that overlap completely
take max(G, T).
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import pipeline_trl
from benchmarks.figures import Figure, Figures, Goal, interleave
from benchmarks.weights_learner import Shape, build_policy, whole_run_config
from benchmarks.workers import Workers
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.models.digits import build_digits_model
from slipstream.tools.cli import at_least

WARM_UP_STEPS = 5
GROUP_SIZE = 8
ENGINES = ("vllm", "hf")
THIS_PYTHON = Path(os.path.relpath(sys.executable))
THREE_MILLION = Shape(vocabulary=32, hidden=256, layers=3)
ANSWER_TOKENS, PROMPT_TOKENS = 64, 16
"""Of each answer; of a prompt at most."""
SHARE_OF_LIMIT = Goal(">=", 0.9)


@dataclass(frozen=True)
class Speed:
    """Means of a run's steps after the first WARM_UP_STEPS."""

    tokens_per_s: float
    """Answer tokens that were trained on."""
    step_s: float
    wait_s: float
    """The learner waits for groups: the generation, where the phases alternate."""
    generator_idle: float
    """Share of time without a running episode."""
    staleness: float

    @property
    def train_s(self) -> float:
        """Training and publication."""
        return self.step_s - self.wait_s


def read_speed(metrics: Path) -> Speed:
    """The speed of a finished run, from its metrics."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if record["kind"] == "step"][WARM_UP_STEPS:]
    total_s = sum(step["step_s"] for step in steps)
    return Speed(
        tokens_per_s=sum(step["actions"] for step in steps) / total_s,
        step_s=total_s / len(steps),
        wait_s=mean(step["wait_s"] for step in steps),
        generator_idle=mean(step.get("generator_idle_fraction", 0.0) for step in steps),
        staleness=mean(step["staleness_mean"] for step in steps),
    )


def run_config(
    folder: Path, name: str, *, model: Path, staleness: int, steps: int, groups_per_step: int, engine: str
) -> RunConfig:
    """A run of `steps` steps after the first WARM_UP_STEPS, on free ports.

    The engine never runs more sequences than a step has answers: larger batches would make generation faster where more
    groups may be in flight.
    """
    return whole_run_config(
        folder,
        name,
        max_staleness=staleness,
        model={"path": str(model), "dtype": "float32"},
        env={"name": "digits", "options": {"operation": "reverse", "length": 3}},
        rewards=[{"name": "digit_match"}],
        rollout={
            "group_size": GROUP_SIZE,
            "groups_in_flight": (staleness + 1) * groups_per_step,
            "sampling": {"max_tokens": ANSWER_TOKENS, "ignore_eos": True},
            "engine": {
                "name": engine,
                "core": "inline",
                "max_model_len": ANSWER_TOKENS + PROMPT_TOKENS,
                "max_sequences": groups_per_step * GROUP_SIZE,
                **({"kv_cache_bytes": 1 << 30} if engine == "vllm" else {}),
            },
        },
        learner={
            "steps": WARM_UP_STEPS + steps,
            "groups_per_step": groups_per_step,
            "optimizer": {"lr": 1e-6, "warmup_steps": 0},
            "checkpoint": {"every_steps": 1_000_000},
        },
        weights={"verify": True},
    )


def run(workers: Workers, config: RunConfig, cores: Sequence[int]) -> Speed:
    """Runs a configuration to its end. Raises: SlipstreamError when a process fails."""
    with workers.run(config, cores=cores) as children:
        workers.wait(children["learner"])
    return read_speed(config.paths.metrics)


def figures_of(by_staleness: Mapping[int, Sequence[Speed]]) -> Iterator[Figure]:
    """Speeds by bound of staleness, beside the limit from the synchronous run's phases."""
    synchronous = by_staleness[0]
    generation_s, training_s = (median(getattr(each, name) for each in synchronous) for name in ("wait_s", "train_s"))
    tokens_per_s = median(speed.tokens_per_s for speed in synchronous)
    limit = tokens_per_s * (generation_s + training_s) / max(generation_s, training_s)
    yield Figure("a step at max_staleness 0", median(speed.step_s for speed in synchronous), "s")
    yield Figure("  generation (G)", generation_s, "s")
    yield Figure("  training (T)", training_s, "s")
    yield Figure("tokens trained at max_staleness 0", tokens_per_s, "/s")
    yield Figure("  limit, (G + T) / max(G, T) times that", limit, "/s")
    for staleness, speeds in by_staleness.items():
        if staleness:
            tokens_per_s = median(speed.tokens_per_s for speed in speeds)
            yield Figure(f"tokens trained at max_staleness {staleness}", tokens_per_s, "/s")
            yield Figure("  staleness, mean", mean(speed.staleness for speed in speeds), "versions")
            yield Figure("  learner waits", mean(speed.wait_s / speed.step_s for speed in speeds), "of a step")
            yield Figure("  generator idle", mean(speed.generator_idle for speed in speeds), "of a step")
            yield Figure(f"  of the limit, {staleness}", tokens_per_s / limit, "", SHARE_OF_LIMIT)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The runs."""
    add, positive = parser.add_argument, at_least(1)
    add("--staleness", nargs="+", type=at_least(0), default=[1, 4], help="values of max_staleness, without TRL also 0")
    add("--rounds", type=positive, default=1, help="runs of each case, in turns")
    add("--groups-per-step", type=positive, default=4, help="groups of 8 answers in a step")
    add("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="rollout.engine.name, without --trl the first")
    alone = parser.add_argument_group("without --trl")
    alone.add_argument("--steps", type=positive, default=40, help="measured steps of a run")
    beside = parser.add_argument_group("in turns with TRL, with answers of log-normal length: 10 minutes on idle cores")
    add = beside.add_argument
    add("--trl", nargs="?", type=Path, const=THIS_PYTHON, help="interpreter with TRL and vLLM, or this one")
    add("--seconds", type=positive, default=60, help="measured time of a run")
    add("--micro-batch", type=positive, default=8, help="answers of one of TRL's micro-batches")
    add("--lr", type=float, default=3e-5, help="learner.optimizer.lr")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures.

    Raises: ConfigError on a machine with one core or without `--trl`'s file, SlipstreamError when a process fails.
    """
    if options.trl is not None:
        if not options.trl.is_file():
            raise ConfigError(f"--trl {options.trl}: there is no such file; leave it out for this environment's TRL")
        return pipeline_trl.measure(options, figures)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("pipeline needs two cores, one for the generator and one for the learner")
    speeds: dict[int, list[Speed]] = defaultdict(list)
    with Workers.start() as workers:
        model = workers.folder / "model"
        build_digits_model(model, seed=0)  # for its tokenizer
        policy: Any = build_policy(THREE_MILLION)
        policy.save_pretrained(model)
        figures.show(Figure("parameters", policy.num_parameters() / 1e6, "million"))
        for staleness in interleave(options.rounds, sorted({0, *options.staleness})):
            config = run_config(
                workers.folder,
                f"staleness{staleness}-{len(speeds[staleness])}",
                model=model,
                staleness=staleness,
                steps=options.steps,
                groups_per_step=options.groups_per_step,
                engine=options.engines[0],
            )
            speeds[staleness].append(run(workers, config, cores[:2]))
    figures.show(*figures_of(speeds))
    return {str(staleness): [asdict(speed) for speed in found] for staleness, found in speeds.items()}
