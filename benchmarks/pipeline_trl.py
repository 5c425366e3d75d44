"""Tokens trained per second of whole runs on answers of log-normal length, in turns with TRL and the same engine.

Every run has the model of `countdown.py`, the same prompts, groups, reward, optimizer and updates, both cores, and the
same time after its first steps. TRL alternates between generation and training; slipstream overlaps them.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from benchmarks.countdown import PROMPT_TOKENS, build_countdown_model, most_tokens, write_prompts
from benchmarks.figures import Figure, Figures, Goal, interleave
from benchmarks.learner import MODEL, run_loop
from benchmarks.weights_learner import whole_run_config
from benchmarks.workers import WAIT_S, Workers, cpu_s
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError, DeadlineError, SlipstreamError
from slipstream.tools.follow import JsonLinesFollower

GROUP_SIZE = 8
TOKEN_BUDGET = 4096
PROMPTS = 4096
WARM_UP_STEPS = {"slipstream": 5, "TRL": 1}
"""Steps before the measured ones: overlapping phases need some until the lag is as usual."""
SCORED_STEPS = 2
"""Last steps whose answers make a score."""
START_S, SLOWEST_STEPS = 300.0, 4.0
"""Time that a run may take besides the measured, and as a multiple of it."""
SPEEDUP = Goal(">=", 2.5)
"""Of slipstream's tokens per second over TRL's with the same engine."""
VLLM = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of vLLM in TRL's process, as a rollout server's."""


@dataclass(frozen=True)
class Case:
    """A run: with TRL if `staleness` is None."""

    engine: str
    staleness: int | None

    @property
    def framework(self) -> str:
        """Its key in WARM_UP_STEPS."""
        return "TRL" if self.staleness is None else "slipstream"

    @property
    def name(self) -> str:
        """A row of the table."""
        return f"TRL, {self.engine}" if self.staleness is None else f"max_staleness {self.staleness}, {self.engine}"


@dataclass(frozen=True)
class Step:
    """A training step and its answers."""

    step_s: float
    wait_s: float
    """Of it, TRL generates, or slipstream's learner waits for groups."""
    tokens: float
    reward: float
    """Mean."""


@dataclass(frozen=True)
class Result:
    """The steps of a run from the first on, and CPU seconds of the measured ones by process."""

    steps: list[Step]
    cpu_s: dict[str, float]
    warm_up_steps: int

    @property
    def measured(self) -> list[Step]:
        """The steps after the first ones."""
        return self.steps[self.warm_up_steps :]

    @property
    def seconds(self) -> float:
        """Time of the measured steps."""
        return sum(step.step_s for step in self.measured)

    @property
    def tokens(self) -> float:
        """Answer tokens that were trained on in the measured steps."""
        return sum(step.tokens for step in self.measured)

    def score(self, updates: int) -> float:
        """Mean reward of the last answers of the first `updates` steps."""
        return mean(step.reward for step in self.steps[:updates][-SCORED_STEPS:])


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures; a run that fails is left out.

    Raises: ConfigError for micro-batches that do not divide a step, Stopped after a signal.
    """
    answers = options.groups_per_step * GROUP_SIZE
    if answers % min(options.micro_batch, answers):
        raise ConfigError(f"--micro-batch {options.micro_batch} must divide a step's {answers} answers")
    cases = [Case(engine, staleness) for engine in options.engines for staleness in (*options.staleness, None)]
    results: dict[Case, list[Result]] = defaultdict(list)
    with Workers.start() as workers:
        build_countdown_model(MODEL, workers.folder / "model")
        prompts = write_prompts(workers.folder / "prompts.jsonl", PROMPTS)
        for number, case in enumerate(interleave(options.rounds, cases)):
            try:
                result = run(workers, case, f"run{number}", prompts, options)
            except SlipstreamError as error:
                workers.check()  # a signal ends all
                figures.fail(case.name, error)
            else:
                results[case].append(result)
                print(f"{case.name}: {result.tokens / result.seconds:.0f} tokens/s", flush=True)
    figures.show(*figures_of(results, answers=answers))
    return {case.name: [asdict(result) for result in found] for case, found in results.items()}


def run(workers: Workers, case: Case, name: str, prompts: Sequence[str], options: argparse.Namespace) -> Result:
    """Runs a case. Raises: SlipstreamError when a process fails, DeadlineError when it takes far too long."""
    config = run_config(workers.folder, name, case, options)
    deadline = time.monotonic() + START_S + SLOWEST_STEPS * options.seconds

    def check_time() -> None:
        if time.monotonic() > deadline:
            raise DeadlineError(f"{case.name} takes more than {SLOWEST_STEPS:g} times --seconds; set a smaller step")

    if case.staleness is not None:
        return run_ours(workers, config, options.seconds, check_time)
    task = trl_task(config, prompts, options)
    folder = config.paths.root
    folder.mkdir()
    (folder / "model").symlink_to(workers.folder / "model")
    result = run_loop(workers, options.trl, "answers", folder, task, VLLM, check_time)
    steps = [Step(**step) for step in result["steps"]]
    return Result(steps, result["cpu_s"], WARM_UP_STEPS["TRL"])


def run_config(folder: Path, name: str, case: Case, options: argparse.Namespace) -> RunConfig:
    """A run without end, on free ports; as many groups are in flight as the bound of staleness admits."""
    staleness = case.staleness or 0
    return whole_run_config(
        folder,
        name,
        max_staleness=staleness,
        model={"path": str(folder / "model"), "dtype": "float32"},
        env={"name": "rows", "options": {"path": str(folder / "prompts.jsonl")}},
        rewards=[{"name": "favoured_share", "function": "benchmarks.loops:favoured_share"}],
        rollout={
            "group_size": GROUP_SIZE,
            "groups_in_flight": (staleness + 1) * options.groups_per_step,
            "sampling": {"max_tokens": most_tokens(MODEL)},
            "engine": {"name": case.engine, "max_model_len": PROMPT_TOKENS + most_tokens(MODEL)},
        },
        learner={
            "steps": 1_000_000,
            "groups_per_step": options.groups_per_step,
            "token_budget": TOKEN_BUDGET,
            "optimizer": {"lr": options.lr, "warmup_steps": 0, "final_lr_fraction": 1},
            "checkpoint": {"every_steps": 1_000_000},
        },
        weights={"verify": True},
    )


def run_ours(workers: Workers, config: RunConfig, seconds: float, tick: Callable[[], None]) -> Result:
    """Runs a configuration for some time after its first steps, with a thread for each process, as `slipstream up`."""
    warm_up_steps, steps = WARM_UP_STEPS["slipstream"], list[Step]()
    metrics = JsonLinesFollower(config.paths.metrics)

    def wait_until(done: Callable[[], bool]) -> None:
        while not done():
            tick()
            workers.pause(WAIT_S)
            steps.extend(
                Step(record["step_s"], record["wait_s"], record["actions"], record["reward"])
                for record in metrics.new_records()
                if record["kind"] == "step"
            )

    with workers.run(config) as children:
        processes = {name: psutil.Process(child.process.pid) for name, child in children.items()}
        wait_until(lambda: len(steps) >= warm_up_steps)
        before_s = {name: cpu_s(process) for name, process in processes.items()}
        ends_at = time.monotonic() + seconds
        wait_until(lambda: time.monotonic() >= ends_at and len(steps) > warm_up_steps)
        used_s = {name: cpu_s(process) - before_s[name] for name, process in processes.items()}
    return Result(steps, used_s, warm_up_steps)


def trl_task(config: RunConfig, prompts: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """The run in TRL's terms, with a thread for each core."""
    learner, optimizer = config.learner, config.learner.optimizer
    answers = learner.groups_per_step * GROUP_SIZE
    return {
        "prompts": prompts,
        "engine": config.rollout.engine.name,
        "model_length": config.rollout.engine.max_model_len,
        "threads": len(psutil.Process().cpu_affinity()),
        "warm_up_steps": WARM_UP_STEPS["TRL"],
        "seconds": options.seconds,
        "settings": {
            "max_steps": learner.steps,
            "per_device_train_batch_size": min(options.micro_batch, answers),
            "gradient_accumulation_steps": max(1, answers // options.micro_batch),
            "num_generations": config.rollout.group_size,
            "max_completion_length": config.rollout.sampling.max_tokens,
            "temperature": config.rollout.sampling.temperature,
            "learning_rate": optimizer.lr,
            "adam_beta1": optimizer.betas[0],
            "adam_beta2": optimizer.betas[1],
            "weight_decay": optimizer.weight_decay,
            "max_grad_norm": optimizer.clip_norm,
        },
    }


def figures_of(results: Mapping[Case, Sequence[Result]], *, answers: int) -> Iterator[Figure]:
    """Rows of a table, those of TRL first: speed, its ratio, where the time goes, and scores.

    Args:
        answers: of a step.
    """
    updates = min((len(run.steps) for runs in results.values() for run in runs), default=0)
    speeds = {case: mean(run.tokens / run.seconds for run in runs) for case, runs in results.items()}
    for case, runs in sorted(results.items(), key=lambda item: item[0].staleness is not None):
        yield Figure(f"{case.name}: tokens trained", speeds[case], "/s")
        if (trl := Case(case.engine, None)) in speeds and case != trl:
            yield Figure("  by that of TRL", speeds[case] / speeds[trl], "", SPEEDUP)
        yield Figure("  generates" if case == trl else "  learner waits", mean(map(wait_share, runs)), "of a step")
        yield Figure("  tokens of an answer", mean(length_of(run, answers) for run in runs))
        for process in ("rollout", "learner") if case != trl else ():
            yield Figure(f"  CPU, {process}", cpu_of(runs, process), "ms/token")
        yield Figure("  CPU, all", sum(cpu_of(runs, process) for process in runs[0].cpu_s), "ms/token")
        yield Figure("  updates", mean(len(run.steps) for run in runs))
        yield Figure(f"  score after {updates}", mean(run.score(updates) for run in runs))
        yield Figure("  score at the end", mean(run.score(len(run.steps)) for run in runs))


def wait_share(run: Result) -> float:
    """Share of the measured time in which the learner waits, or TRL generates."""
    return sum(step.wait_s for step in run.measured) / run.seconds


def length_of(run: Result, answers: int) -> float:
    """Mean length of the measured answers."""
    return run.tokens / answers / len(run.measured)


def cpu_of(runs: Sequence[Result], process: str) -> float:
    """CPU time of a process, in milliseconds per token that was trained on."""
    return 1000 * mean(run.cpu_s[process] / run.tokens for run in runs)
