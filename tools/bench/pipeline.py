"""`slipstream bench pipeline`: speed of the whole system by bound of staleness, beside the limit of overlapping phases.

Generator and learner have a core each; buffer and Redis run on the learner's. In the synchronous run the phases
alternate: a step takes G (the learner waits for groups) + T (it trains and publishes). Phases that overlap completely
take max(G, T).
"""

import argparse
import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from slipstream.configs import RunConfig
from slipstream.configs.load import dump_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.models.digits import build_digits_model
from slipstream.tools.bench.figures import Figure, Figures, Goal, bench_parser, interleave
from slipstream.tools.bench.pipeline_server import LENGTHS_VARIABLE, MOST_TOKENS, Lengths
from slipstream.tools.bench.weights_learner import Shape, build_policy, weights_config
from slipstream.tools.bench.workers import ONE_THREAD, Workers, free_port
from slipstream.tools.cli import at_least
from slipstream.tools.launch.redis import redis_command, wait_until_ready
from slipstream.tools.launch.supervise import Child

WARM_UP_STEPS = 5
GROUP_SIZE = 8
THREE_MILLION = Shape(vocabulary=32, hidden=256, layers=3)
PROMPT_TOKENS = 16
"""At most."""
SHARE_OF_LIMIT = 0.9
REDIS_DEADLINE_S = 60.0


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
    answer_tokens: float

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
        answer_tokens=mean(step["answer_tokens"] for step in steps),
    )


def run_config(
    folder: Path, name: str, *, model: Path, staleness: int, steps: int, groups_per_step: int, engine: str
) -> RunConfig:
    """A run of `steps` steps after the first WARM_UP_STEPS, on free ports.

    The engine never runs more sequences than a step has answers: larger batches would make generation faster where more
    groups may be in flight.
    """
    address = f"tcp://127.0.0.1:{free_port()}"
    return weights_config(
        folder,
        name,
        model={"path": str(model), "dtype": "float32"},
        env={"name": "digits", "options": {"operation": "reverse", "length": 3}},
        rewards=[{"name": "digit_match"}],
        scoring={"workers": 0},
        eval={"tasks": 0},
        redis={"port": free_port()},
        buffer={"bind": address, "endpoint": address, "max_staleness": staleness},
        rollout={
            "group_size": GROUP_SIZE,
            "groups_in_flight": (staleness + 1) * groups_per_step,
            "sampling": {"max_tokens": MOST_TOKENS, "ignore_eos": True},
            "engine": {
                "name": engine,
                "core": "inline",
                "max_model_len": MOST_TOKENS + PROMPT_TOKENS,
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


@contextlib.contextmanager
def run_processes(
    workers: Workers,
    config: RunConfig,
    *,
    rollout: str = "slipstream.rollout_servers.cli",
    cores: Sequence[int] | None = None,
    environment: Mapping[str, str] = ONE_THREAD,
) -> Iterator[dict[str, Child]]:
    """The four processes of a run, by name: redis, buffer, rollout, learner.

    Args:
        rollout: module of the rollout server.
        cores: of the rollout server, and of the other processes; None: any.
    """
    name, file = config.run.name, workers.folder / f"{config.run.name}.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    modules = {"buffer": "slipstream.buffer.cli", "rollout": rollout, "learner": "slipstream.learner.cli"}
    children: dict[str, Child] = {}

    def add(role: str, process: contextlib.AbstractContextManager[Child]) -> None:
        children[role] = stack.enter_context(process)
        if cores is not None:  # before it starts threads, which inherit it
            os.sched_setaffinity(children[role].process.pid, {cores[0] if role == "rollout" else cores[1]})

    with contextlib.ExitStack() as stack:
        add("redis", workers.command(f"{name}-redis", redis_command(config.redis, config.paths.redis)))
        wait_until_ready(config.redis, REDIS_DEADLINE_S, pause=workers.pause)
        for role, module in modules.items():
            add(role, workers.process(f"{name}-{role}", module, str(file), environment=environment))
        yield children


def measure(workers: Workers, config: RunConfig, lengths: Lengths, cores: Sequence[int]) -> Speed:
    """Runs a configuration to its end. Raises: SlipstreamError when a process fails."""
    environment = {**ONE_THREAD, LENGTHS_VARIABLE: lengths}
    server = "slipstream.tools.bench.pipeline_server"
    with run_processes(workers, config, rollout=server, cores=cores, environment=environment) as children:
        workers.wait(children["learner"])
    return read_speed(config.paths.metrics)


def figures_of(lengths: Lengths, by_staleness: dict[int, list[Speed]]) -> list[Figure]:
    """Speeds by bound of staleness, beside the limit from the synchronous run's phases."""
    synchronous = by_staleness[0]
    step_s = median(speed.step_s for speed in synchronous)
    phases = {name: median(getattr(speed, name) for speed in synchronous) for name in ("wait_s", "train_s")}
    tokens_per_s = median(speed.tokens_per_s for speed in synchronous)
    limit = tokens_per_s * sum(phases.values()) / max(phases.values())
    found = [
        Figure(f"{lengths}: tokens of an answer, mean", mean(speed.answer_tokens for speed in synchronous), ""),
        Figure("  a step at max_staleness 0", step_s, "s"),
        Figure("  generation (G)", phases["wait_s"], "s"),
        Figure("  training (T)", phases["train_s"], "s"),
        Figure("  tokens trained at max_staleness 0", tokens_per_s, "/s"),
        Figure("  limit, (G + T) / max(G, T) times that", limit, "/s"),
    ]
    for staleness, speeds in by_staleness.items():
        if staleness == 0:
            continue
        tokens_per_s = median(speed.tokens_per_s for speed in speeds)
        found += [
            Figure(f"  tokens trained at max_staleness {staleness}", tokens_per_s, "/s"),
            Figure("    staleness, mean", mean(speed.staleness for speed in speeds), "versions"),
            Figure("    learner waits", mean(speed.wait_s / speed.step_s for speed in speeds), "of a step"),
            Figure("    generator idle", mean(speed.generator_idle for speed in speeds), "of a step"),
            Figure(f"    of the limit, {lengths}, {staleness}", tokens_per_s / limit, "", Goal(">=", SHARE_OF_LIMIT)),
        ]
    return found


def command(argv: Sequence[str]) -> int:
    """Measures, prints and saves all figures; returns 0, also when goals are missed.

    Raises: ConfigError on a machine with one core, SlipstreamError when a process fails.
    """
    arguments = _parser().parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("bench pipeline needs two cores, one for the generator and one for the learner")
    figures, details = Figures(), {}
    with Workers.start() as workers:
        model = workers.folder / "model"
        build_digits_model(model, seed=0)  # for its tokenizer
        policy: Any = build_policy(THREE_MILLION)
        policy.save_pretrained(model)
        figures.show([Figure("parameters", policy.num_parameters() / 1e6, "million")])
        for lengths in arguments.lengths:
            speeds: dict[int, list[Speed]] = defaultdict(list)
            for staleness in interleave(arguments.rounds, sorted({0, *arguments.staleness})):
                config = run_config(
                    workers.folder,
                    f"{lengths}-{staleness}-{len(speeds[staleness])}",
                    model=model,
                    staleness=staleness,
                    steps=arguments.steps,
                    groups_per_step=arguments.groups_per_step,
                    engine=arguments.engine,
                )
                speeds[staleness].append(measure(workers, config, lengths, cores[:2]))
            figures.show(figures_of(lengths, speeds))
            details[lengths] = {staleness: [asdict(speed) for speed in found] for staleness, found in speeds.items()}
    figures.save_bench("pipeline", arguments, details=details)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("pipeline", "Measure what asynchrony gains, on two cores.")
    add = parser.add_argument
    add("--lengths", nargs="+", choices=("fixed", "log-normal"), default=["fixed", "log-normal"],
        help="distributions of the answers' lengths (default: both)")  # fmt: skip
    add("--staleness", nargs="+", type=at_least(0), default=[1, 2, 4],
        help="values of max_staleness besides 0 (default: 1 2 4)")  # fmt: skip
    add("--steps", type=at_least(1), default=40, help="measured steps of a run (default: 40)")
    add("--groups-per-step", type=at_least(1), default=8, help="groups of 8 answers in a step (default: 8)")
    add("--rounds", type=at_least(1), default=1, help="runs of each case, in turns (default: 1)")
    add("--engine", choices=("vllm", "hf"), default="vllm", help="rollout.engine.name (default: vllm)")
    return parser
