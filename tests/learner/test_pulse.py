"""Learner ranks of which one is frozen: the others say which, and end."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.learner.parallel.mesh import join_world, leave_world
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
ENDS_WITHIN_S = 60.0

Ranks = list["subprocess.Popen[str]"]


@pytest.fixture
def start_ranks() -> Iterator[Callable[[float], Ranks]]:
    """Starts two ranks with that deadline as torchrun does, whose store is in neither of them, but here."""
    stores = []
    with ExitStack() as cleanup:

        def start(deadline_s: float) -> Ranks:
            port = free_port()
            stores.append(dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False))
            described = {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
                "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            ranks = []
            for rank in range(2):
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.learner.waiting_rank", str(deadline_s)],
                    cwd=ROOT,
                    env={**os.environ, **described, "RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                cleanup.enter_context(process)
                cleanup.callback(process.kill)
                ranks.append(process)
            for process in ranks:
                heard(process, "ready")
            return ranks

        yield start


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_that_waits_for_a_frozen_one_says_for_which_and_ends(
    frozen: int, start_ranks: Callable[[float], Ranks]
) -> None:
    ranks = start_ranks(3.0)
    ranks[frozen].send_signal(signal.SIGSTOP)
    waits = ranks[1 - frozen]
    said = waits.communicate("meet\n", timeout=ENDS_WITHIN_S)[0]
    assert waits.returncode == 1
    assert f"learner rank {frozen} on {socket.gethostname()} has been silent for learner.wait_deadline_s=3" in said


def test_a_rank_that_is_frozen_for_less_than_the_deadline_costs_a_warning(
    start_ranks: Callable[[float], Ranks],
) -> None:
    ranks = start_ranks(600.0)
    ranks[1].send_signal(signal.SIGSTOP)
    tell(ranks[0], "meet")
    assert "rank=1" in heard(ranks[0], "a learner rank is silent")
    ranks[1].send_signal(signal.SIGCONT)
    tell(ranks[1], "meet")
    for process in ranks:
        heard(process, "meet")
        tell(process, "end")
    assert [process.wait(ENDS_WITHIN_S) for process in ranks] == [0, 0]


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_has_left_is_not_missed(first: int, start_ranks: Callable[[float], Ranks]) -> None:
    ranks = start_ranks(4.0)
    tell(ranks[first], "end")
    assert ranks[first].wait(ENDS_WITHIN_S) == 0
    said = ranks[1 - first].communicate("outlive\nend\n", timeout=ENDS_WITHIN_S)[0]
    assert ranks[1 - first].returncode == 0, said
    assert "silent" not in said


def test_a_collective_waits_for_longer_than_rank_0_may_wait_for_others() -> None:
    join_world(root_waits_s=5000.0)
    try:
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout > timedelta(seconds=5000)
    finally:
        leave_world()


def tell(process: "subprocess.Popen[str]", what: str) -> None:
    """Gives a rank a line."""
    assert process.stdin is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()


def heard(process: "subprocess.Popen[str]", what: str) -> str:
    """The line in which a rank says that; its end, or the test's deadline, ends the wait."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if what in line:
            return line
    raise AssertionError(f"it ended without saying {what!r}: {''.join(said)}")
