"""Processes that leave a gloo transfer group end as if they had never been in it."""

import subprocess
import sys

from tests.conftest import free_port
from tests.learner.weights.leaves import DEADLINE_S


def started(role: str, port: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.learner.weights.leaves", role, str(port)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def says(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_both_ends_exit_cleanly_after_leaving_a_group() -> None:
    port = free_port()
    with started("learner", port) as learner, started("server", port) as server:
        try:
            assert [says(learner), says(learner), says(server)] == ["listens", "entered", "entered"]
            for process in (learner, server):
                process.communicate(timeout=DEADLINE_S)
                assert process.returncode == 0
        finally:
            learner.kill()
            server.kill()
