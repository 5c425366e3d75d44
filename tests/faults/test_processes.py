"""A real run whose servers join and leave, and whose processes are killed or stopped and return: no group is lost."""

import json
import os
import random
import signal
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.faults.processes import Fault, Run, running

NAMES = ("redis", "buffer", "rollout", "learner")
STEPS_AT_THE_END = 12
LEARNER_KILLS = 12
MOST_RECOVERY_S = 30.0
"""Three times the documented figure, for a busy machine. The figures are printed."""


def inject(run: Run, faults: Sequence[Fault], rng: random.Random) -> None:
    """Injects all faults, a few steps apart, then restarts the learner to finish."""
    for fault in faults:
        run.until_steps(rng.randint(1, 15), "some steps")
        run.inject(fault, "learner.steps=100000")
    run.until_steps(rng.randint(1, 15), "some steps")
    run.finish_soon(STEPS_AT_THE_END)
    figures = [
        f"{fault.name} {fault.signal.name} {fault.away_s:.1f} s: {after_s:.1f} s" for fault, after_s in run.recoveries
    ]
    print("recovered after:", *figures, sep="\n  ")  # noqa: T201  (pytest -s shows it: the figures of docs/faults.md)
    slow = [figure for figure, (_, after_s) in zip(figures, run.recoveries, strict=True) if after_s > MOST_RECOVERY_S]
    assert not slow, slow


def join_and_leave(run: Run) -> None:
    """Two more servers join; one is killed and one stopped."""
    assert run.figure("weights/members") == 1
    for name in ("rollout-2", "rollout-3"):
        run.start(name, "rollout.notice_s=60")
    run.until(lambda: run.figure("weights/members") == 3, "three servers get weights")
    run.until_steps(5, "training with three servers")
    run.end("rollout-3", signal.SIGKILL)
    assert run.end("rollout-2", signal.SIGTERM) == 0
    lines = [json.loads(line) for line in (run.config.paths.logs / "buffer.jsonl").read_text().splitlines()]
    left = [line for line in lines if line["event"] == "server left" and not line["server"].endswith("-check")]
    assert [line["tickets_reissued"] for line in left] == [0]
    run.until(lambda: run.figure("weights/members") == 1, "the dead server is evicted, the stopped one has left")
    run.until_steps(5, "training with the last server")
    assert run.figure("weights/evictions") == 1, "a stopped server leaves without eviction"


@pytest.mark.timeout(600)
def test_joins_and_kills_lose_no_group(tmp_path: Path, forks: ForkServerContext) -> None:
    rng = random.Random(11)
    killed = [
        Fault(name, signal.SIGKILL, rng.uniform(0, 1)) for name in rng.sample(("redis", "buffer", "rollout"), k=3)
    ]
    with running(tmp_path, forks) as run:
        join_and_leave(run)
        inject(run, killed, rng)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_run_survives_many_faults(tmp_path: Path, forks: ForkServerContext, seed: int) -> None:
    rng = random.Random(seed)
    rounds = int(os.environ.get("SOAK_ROUNDS", "20"))
    faults = [
        Fault(rng.choice(NAMES), rng.choice([signal.SIGKILL, signal.SIGSTOP]), rng.uniform(0, 15))
        for _ in range(rounds)
    ]
    with running(tmp_path, forks) as run:
        inject(run, faults, rng)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_restarted_learner_loses_few_groups(tmp_path: Path, forks: ForkServerContext) -> None:
    """At a low staleness: nearly all groups in the pipeline are of versions that the restarts undo."""
    rng = random.Random(7)
    with running(tmp_path, forks, "buffer.max_staleness=2") as run:
        inject(run, [Fault("learner", signal.SIGKILL, rng.uniform(0, 5)) for _ in range(LEARNER_KILLS - 1)], rng)
        counts = run.pipeline.summary()["groups"]
        reasons = counts["reasons"]
        print(f"{counts['issued']} issued, of them expired: {reasons}")  # noqa: T201  (docs/faults.md)
        gradients = defaultdict[tuple[int, float], list[float]](list)
        for record in run.pipeline.records("step"):
            gradients[record["step"], record["lr"]].append(
                record["grad_norm"]
            )  # the last start ends, and decays, earlier
        assert all(max(each) == pytest.approx(min(each), rel=1e-3) for each in gradients.values()), "not repeated"
        lost = reasons.get("expired:too_stale", 0)
        assert lost <= LEARNER_KILLS * run.config.learner.groups_per_step, reasons
