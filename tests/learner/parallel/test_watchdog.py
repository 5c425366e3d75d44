"""The watchdog of the learner's ranks."""

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

ROOT = Path(__file__).parents[3]
ENDS_WITHIN_S = 60.0

Ranks = list["subprocess.Popen[str]"]


@pytest.fixture
def start_ranks() -> Iterator[Callable[[float], Ranks]]:
    """Starts two ranks with that deadline as torchrun does; their store is in this process."""
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
                    [sys.executable, "-m", "tests.learner.parallel.waiting_rank", str(deadline_s)], cwd=ROOT,
                    env={**os.environ, **described, "RANK": str(rank)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, text=True,
                )  # fmt: skip
                cleanup.enter_context(process)
                cleanup.callback(process.kill)
                ranks.append(process)
            for process in ranks:
                line_with(process, "ready")
            return ranks

        yield start


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_rank_is_named_and_others_exit(frozen: int, start_ranks: Callable[[float], Ranks]) -> None:
    ranks = start_ranks(3.0)
    ranks[frozen].send_signal(signal.SIGSTOP)
    waits = ranks[1 - frozen]
    output = waits.communicate("barrier\n", timeout=ENDS_WITHIN_S)[0]
    assert waits.returncode == 1
    assert f"learner rank {frozen} on {socket.gethostname()} " in output and "learner.wait_deadline_s=3" in output


def test_short_freeze_is_warned_of(start_ranks: Callable[[float], Ranks]) -> None:
    ranks = start_ranks(600.0)
    ranks[1].send_signal(signal.SIGSTOP)
    send(ranks[0], "barrier")
    assert "rank=1" in line_with(ranks[0], "a learner rank is silent")
    ranks[1].send_signal(signal.SIGCONT)
    send(ranks[1], "barrier")
    for process in ranks:
        line_with(process, "barrier")
        send(process, "end")
    assert [process.wait(ENDS_WITHIN_S) for process in ranks] == [0, 0]


@pytest.mark.parametrize("first", [0, 1])
def test_rank_that_left_is_not_reported(first: int, start_ranks: Callable[[float], Ranks]) -> None:
    ranks = start_ranks(4.0)
    send(ranks[first], "end")
    assert ranks[first].wait(ENDS_WITHIN_S) == 0
    output = ranks[1 - first].communicate("outlive\nend\n", timeout=ENDS_WITHIN_S)[0]
    assert ranks[1 - first].returncode == 0, output
    assert "silent" not in output


def test_collectives_outlast_waits_of_rank_0() -> None:
    join_world(root_waits_s=5000.0)
    try:
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout > timedelta(seconds=5000)
    finally:
        leave_world()


def send(process: "subprocess.Popen[str]", text: str) -> None:
    """Sends a command to a rank."""
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def line_with(process: "subprocess.Popen[str]", text: str) -> str:
    """The first line of a rank's output with this text; fails when the output ends."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError(f"the output ended without {text!r}: {''.join(lines)}")
