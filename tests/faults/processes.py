"""A real run of processes that tests kill, stop and restart."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path

from redis.asyncio import Redis

from slipstream.configs import RunConfig
from slipstream.configs.load import create_run_folder, load_config
from slipstream.tools.launch.redis import ping_problem, redis_command
from tests.conftest import free_port
from tests.faults.accounting import History, assert_accounted_for
from tests.pipeline.conftest import Pipeline
from tests.pipeline.forked import Forked

SETTINGS = (
    "eval.every_steps=0", "learner.checkpoint.every_steps=10", "buffer.retention.max_groups=1000000",
    # Deadlines that must outlast the absence of a process, on a busy machine.
    "redis.deadline_s=5", "redis.outage_deadline_s=200", "buffer.reply_deadline_s=200", "learner.wait_deadline_s=200",
    "rollout.group_deadline_s=100", "weights.deadline_s=20", "buffer.server_deadline_s=10",
    # With everysec and a busy disk, Redis writes acknowledged changes up to 2 s late.
    "redis.fsync=always",
)  # fmt: skip
MODULES = {
    "buffer": "slipstream.buffer.cli", "rollout": "slipstream.rollout_servers.cli", "learner": "slipstream.learner.cli",
}  # fmt: skip
UP = {"buffer": "buffer serves", "rollout": "joined the buffer", "learner": "continuing"}
"""Log line of each once it has started."""
DEADLINE_S = 150.0
MOST_MISMATCH = 1e-4
"""Mean |Δ log-prob| between vLLM and the learner in fp32 at the same weights; other weights are further away."""


@dataclass(frozen=True)
class Fault:
    """A signal to a process, and how long the process is away."""

    name: str
    signal: signal.Signals
    away_s: float


@dataclass
class Run:
    """The processes of one run and their output."""

    pipeline: Pipeline
    config: RunConfig
    forks: ForkServerContext
    overrides: tuple[str, ...] = ()
    """Of all processes."""
    processes: "dict[str, subprocess.Popen[bytes] | Forked]" = field(default_factory=dict)
    recoveries: list[tuple[Fault, float]] = field(default_factory=list)
    """Fault, and seconds from the return of its process until the run continued."""

    def start(self, name: str, *overrides: str) -> None:
        """Starts a process, for the first time or again; `rollout-2` is another rollout server beside `rollout`."""
        self._output(name).unlink(missing_ok=True)  # that of an earlier start
        if name != "redis":
            arguments = self.pipeline.arguments(*SETTINGS, *self.overrides, *overrides)
            self.processes[name] = Forked(self.forks, MODULES[name.partition("-")[0]], arguments, self._output(name))
            return
        with self._output(name).open("wb") as output:
            self.processes[name] = subprocess.Popen(
                redis_command(self.config.redis, self.config.paths.redis), stdout=output, stderr=subprocess.STDOUT
            )

    def inject(self, fault: Fault, *overrides: str) -> None:
        """Injects one fault; returns when the run continues."""
        process = self.processes[fault.name]
        process.send_signal(fault.signal)
        if fault.signal == signal.SIGKILL:
            process.wait(DEADLINE_S)
        time.sleep(fault.away_s)
        if fault.signal == signal.SIGKILL:
            self.start(fault.name, *overrides)
            self.until(lambda: self._up(fault.name), f"{fault.name} is up again")
        else:
            process.send_signal(signal.SIGCONT)
        since = time.monotonic()
        self.until_steps(3, f"training after {fault}")
        self.recoveries.append((fault, time.monotonic() - since))

    def end(self, name: str, how: signal.Signals) -> int:
        """Ends a process; its exit code."""
        process = self.processes.pop(name)
        process.send_signal(how)
        return process.wait(DEADLINE_S)

    def until_steps(self, count: int, what: str) -> None:
        """Waits for so many training steps from now on."""
        before = self.steps()
        self.until(lambda: self.steps() >= before + count, what)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for a condition; fails if a process ends."""
        give_up = time.monotonic() + DEADLINE_S
        while not condition():
            for name, process in self.processes.items():
                assert process.poll() is None, f"{what}: {name} ended: {self._output(name).read_text()[-4000:]}"
            assert time.monotonic() < give_up, f"{what}: not within {DEADLINE_S:g} s"
            time.sleep(0.02)

    def figure(self, name: str) -> float | None:
        """A figure of the last training step."""
        records = self.pipeline.records("step")
        return records[-1].get(name) if records else None

    def steps(self) -> int:
        """Reported training steps, including undone ones."""
        return len(self.pipeline.records("step"))

    def finish(self) -> History:
        """Waits for the end of the run; its history."""
        assert self.processes["learner"].wait(DEADLINE_S) == 0, self._output("learner").read_text()[-4000:]
        summary = self.pipeline.summary()
        assert summary["engine_mismatch_abs"] < MOST_MISMATCH
        assert summary["staleness_max"] <= self.config.buffer.max_staleness

        async def account() -> History:
            async with Redis.from_url(self.config.redis.address) as redis:
                return await assert_accounted_for(redis, self.config, steps=self.pipeline.records("step")[-1]["step"])

        return asyncio.run(account())

    def finish_soon(self, steps: int) -> History:
        """Kills the learner and restarts it for that many more steps; the history of the run."""
        last: int = self.pipeline.records("step")[-1]["step"] + steps
        self.inject(
            Fault("learner", signal.SIGKILL, away_s=0.5), f"learner.steps={last}", "learner.optimizer.warmup_steps=0"
        )
        history = self.finish()
        assert list(history) == list(range(last))
        return history

    def _up(self, name: str) -> bool:
        if name == "redis":
            return not ping_problem(self.config.redis)
        output = self._output(name)
        return output.exists() and UP[name.partition("-")[0]] in output.read_text()

    def _output(self, name: str) -> Path:
        return self.pipeline.folder / f"{name}.output"


@contextmanager
def running(folder: Path, forks: ForkServerContext, *overrides: str) -> Iterator[Run]:
    """A run that trains until it is stopped."""
    pipeline = Pipeline(folder, [free_port() for _ in range(5)])
    arguments = pipeline.arguments(*SETTINGS, *overrides, "learner.steps=100000")
    config = load_config(Path(arguments[0]), arguments[1:])
    create_run_folder(config.paths, config)
    run = Run(pipeline, config, forks, overrides)
    try:
        run.start("redis")
        run.until(lambda: not ping_problem(config.redis), "Redis answers")
        for name in MODULES:
            run.start(name, "learner.steps=100000")
        run.until_steps(5, "the first steps")
        yield run
    finally:
        for process in reversed(run.processes.values()):
            process.kill()
            process.wait(DEADLINE_S)
