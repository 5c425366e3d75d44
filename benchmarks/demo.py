"""Time and CPU time of the demo's steps, in turns with TRL's GRPOTrainer on the same task."""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from benchmarks.figures import Figure, Figures, Goal, interleave
from benchmarks.learner import add_trl_option, has_trl, run_loop
from benchmarks.workers import Workers, cpu_s, free_port
from slipstream.configs import RunConfig, load
from slipstream.configs.load import load_config
from slipstream.env.registry import build_env
from slipstream.models.digits import build_digits_model
from slipstream.tools.cli import at_least
from slipstream.tools.follow import JsonLinesFollower

DEMO = Path(load.__file__).parent / "demo.yaml"
OURS, TRL = "slipstream", "TRL"
SPEEDUP = Goal(">=", 1.6)
"""Of TRL's time of a step divided by ours."""

Result = dict[str, float]
"""`step_s`, `score`, and CPU seconds of a step: `cpu_s`, of slipstream also by process, `cpu_s/<process>`."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The runs."""
    add = parser.add_argument
    add("--rounds", type=at_least(1), default=3, help="runs of each")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to the demo's configuration")
    add_trl_option(parser)


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures. Raises: ConfigError without `--trl-python`'s file, SlipstreamError."""
    results: dict[str, list[Result]] = defaultdict(list)
    names = [OURS, TRL] if has_trl(options) else [OURS]
    with Workers.start() as workers:
        for name in interleave(options.rounds, names):
            config = demo_config(workers.folder, f"{name}-{len(results[name])}", options.set)
            run = run_demo(workers, config) if name == OURS else run_trl(workers, config, options.trl_python)
            results[name].append(run)
            print(f"{name}: {1000 * run['step_s']:.1f} ms a step, score {run['score']:.3f}", flush=True)
    figures.show(*figures_of(results))
    return results


def demo_config(folder: Path, name: str, overrides: Sequence[str]) -> RunConfig:
    """The demo in a folder of its own, on free ports."""
    address = f"tcp://127.0.0.1:{free_port()}"
    ports = [f"weights.{port}={free_port()}" for port in ("control_port", "store_port", "stream_port")]
    own = [f"run.name={name}", f"run.dir={folder}", f"redis.port={free_port()}"]
    own += [f"buffer.bind={address}", f"buffer.endpoint={address}"]
    return load_config(DEMO, [*own, *ports, *overrides])


class CpuClock:
    """CPU time of processes between two training steps."""

    def __init__(self, metrics: Path, processes: Mapping[str, psutil.Process]) -> None:
        self._metrics = JsonLinesFollower(metrics)
        self._processes = processes
        self._first: tuple[int, dict[str, float]] | None = None
        self._last: tuple[int, dict[str, float]] = (0, {})

    def tick(self) -> None:
        """Reads the clocks if steps were made since the last call."""
        steps = [record["step"] for record in self._metrics.new_records() if record["kind"] == "step"]
        if not steps or not all(process.is_running() for process in self._processes.values()):
            return
        self._last = steps[-1], {name: cpu_s(process) for name, process in self._processes.items()}
        self._first = self._first or self._last

    def per_step(self) -> Result:
        """CPU seconds of a step by process; 0 where the run was too short."""
        (last, used_s), (first, before_s) = self._last, self._first or self._last
        steps = max(1, last - first)
        by_process = {f"cpu_s/{name}": (used_s[name] - before_s[name]) / steps for name in used_s}
        return {"cpu_s": sum(by_process.values())} | by_process


def run_demo(workers: Workers, config: RunConfig) -> Result:
    """Runs the demo to its end. Raises: SlipstreamError when a process fails."""
    with workers.run(config) as children:
        processes = {name: psutil.Process(child.process.pid) for name, child in children.items()}
        clock = CpuClock(config.paths.metrics, processes)
        workers.wait(children["learner"], clock.tick)
    records = [json.loads(line) for line in config.paths.metrics.read_text(encoding="utf-8").splitlines()]
    summary = json.loads(config.paths.summary.read_text(encoding="utf-8"))
    step_s = mean(record["step_s"] for record in records if record["kind"] == "step")
    return {"step_s": step_s, "score": summary["eval_score"]} | clock.per_step()


def run_trl(workers: Workers, config: RunConfig, python: Path) -> Result:
    """Trains with TRL. Raises: SlipstreamError when that fails."""
    folder = config.paths.root
    folder.mkdir()
    build_digits_model(folder / "model", seed=config.run.seed)
    return run_loop(workers, python, "demo", folder, trl_task(config))


def trl_task(config: RunConfig) -> dict[str, Any]:
    """The demo's tasks and settings in TRL's terms."""
    env, learner, optimizer = build_env(config.env), config.learner, config.learner.optimizer

    def pairs(split: Any) -> list[tuple[Any, str]]:
        tasks = [env.task(split, index) for index in range(env.size(split))]
        return [(task.prompt, task.reference) for task in tasks]

    return {
        "train": pairs("train"),
        "eval": pairs("eval")[: config.eval.tasks],
        "answer_tokens": config.rollout.sampling.max_tokens,
        "threads": 1,
        "settings": {
            "seed": config.run.seed,
            "max_steps": learner.steps,
            "per_device_train_batch_size": learner.groups_per_step * config.rollout.group_size,
            "steps_per_generation": learner.updates_per_step,
            "num_generations": config.rollout.group_size,
            "temperature": config.rollout.sampling.temperature,
            "learning_rate": optimizer.lr,
            "warmup_steps": optimizer.warmup_steps,
            "adam_beta1": optimizer.betas[0],
            "adam_beta2": optimizer.betas[1],
            "weight_decay": optimizer.weight_decay,
            "max_grad_norm": optimizer.clip_norm,
            "entropy_coef": learner.loss.entropy_bonus,
        },
    }


def figures_of(results: Mapping[str, Sequence[Result]]) -> Iterator[Figure]:
    """Means over the rounds, and the ratio of the two times of a step."""
    means = {name: {key: mean(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()}
    for name, values in means.items():
        yield Figure(f"{name}: a step", 1000 * values["step_s"], "ms")
        yield Figure("  score at the end, mean", values["score"])
        yield Figure("  CPU time of a step", 1000 * values["cpu_s"], "ms")
        for key, value in values.items():
            if key.startswith("cpu_s/"):
                yield Figure(f"    {key.partition('/')[2]}", 1000 * value, "ms")
    if TRL in means:
        yield Figure("a step, TRL / slipstream", means[TRL]["step_s"] / means[OURS]["step_s"], "", SPEEDUP)
