"""Rollout servers join and leave during a real run."""

import signal
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.faults.processes import running

STEPS_AT_THE_END = 12


@pytest.mark.timeout(600)
def test_servers_join_and_leave_without_loss(tmp_path: Path, forks: ForkServerContext) -> None:
    with running(tmp_path, forks) as run:
        assert run.figure("weights/members") == 1
        for name in ("rollout-2", "rollout-3"):
            run.start(name)
        run.until(lambda: run.figure("weights/members") == 3, "three servers get weights")
        run.until_steps(5, "training with three servers")
        run.end("rollout", signal.SIGKILL)
        assert run.end("rollout-2", signal.SIGTERM) == 128 + signal.SIGTERM
        run.until(lambda: run.figure("weights/members") == 1, "the dead server is evicted, the stopped one has left")
        run.until_steps(5, "training with the last server")
        assert run.figure("weights/evictions") == 1, "a stopped server leaves without eviction"
        run.finish_soon(STEPS_AT_THE_END)
