"""The watchdog of the learner's ranks."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.learner.parallel.mesh import join_world, leave_world
from tests.conftest import free_port
from tests.pipeline.forked import Forked

ENDS_WITHIN_S = 60.0


class Rank:
    """A rank that carries out commands."""

    def __init__(self, forks: ForkServerContext, folder: Path, rank: int, port: int, *, deadline_s: float) -> None:
        commands, self._output = folder / f"commands-{rank}", folder / f"output-{rank}"
        os.mkfifo(commands)
        module = "tests.learner.parallel.waiting_rank"
        self.process = Forked(forks, module, [*map(str, (deadline_s, rank, port, commands))], self._output)
        # For reading too: otherwise it would wait for a rank that did not start.
        self._commands = os.fdopen(os.open(commands, os.O_RDWR), "w")

    def send(self, *commands: str) -> None:
        """Sends it commands."""
        self._commands.write("".join(f"{command}\n" for command in commands))
        self._commands.flush()

    @property
    def output(self) -> str:
        """All that it has printed so far."""
        return self._output.read_text() if self._output.exists() else ""

    def line_with(self, text: str) -> str:
        """The first line of its output with this text; fails when it ends without one."""
        give_up = time.monotonic() + ENDS_WITHIN_S
        while True:
            ended = self.process.poll() is not None
            for line in self.output.splitlines():
                if text in line:
                    return line
            assert not ended, f"it ended without {text!r}: {self.output}"
            assert time.monotonic() < give_up, f"no {text!r} within {ENDS_WITHIN_S} s: {self.output}"
            time.sleep(0.02)

    def close(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.wait(ENDS_WITHIN_S)
        self._commands.close()


@pytest.fixture
def start_ranks(forks: ForkServerContext, tmp_path: Path) -> Iterator[Callable[[float], list[Rank]]]:
    """Starts two ranks with that deadline as torchrun does; their store is in this process."""
    stores = []
    with ExitStack() as cleanup:

        def start(deadline_s: float) -> list[Rank]:
            port = free_port()
            stores.append(dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False))
            ranks = [Rank(forks, tmp_path, rank, port, deadline_s=deadline_s) for rank in range(2)]
            for rank in ranks:
                cleanup.callback(rank.close)
            for rank in ranks:
                rank.line_with("ready")
            return ranks

        yield start


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_rank_is_named_and_others_exit(frozen: int, start_ranks: Callable[[float], list[Rank]]) -> None:
    ranks = start_ranks(3.0)
    ranks[frozen].process.send_signal(signal.SIGSTOP)
    waits = ranks[1 - frozen]
    waits.send("barrier")
    assert waits.process.wait(ENDS_WITHIN_S) == 1
    assert f"learner rank {frozen} on {socket.gethostname()} " in waits.output
    assert "learner.wait_deadline_s=3" in waits.output


def test_short_freeze_is_warned_of(start_ranks: Callable[[float], list[Rank]]) -> None:
    ranks = start_ranks(600.0)
    ranks[1].process.send_signal(signal.SIGSTOP)
    ranks[0].send("barrier")
    assert "rank=1" in ranks[0].line_with("a learner rank is silent")
    ranks[1].process.send_signal(signal.SIGCONT)
    ranks[1].send("barrier")
    for rank in ranks:
        rank.line_with("barrier")
        rank.send("end")
    assert [rank.process.wait(ENDS_WITHIN_S) for rank in ranks] == [0, 0]


@pytest.mark.parametrize("first", [0, 1])
def test_rank_that_left_is_not_reported(first: int, start_ranks: Callable[[float], list[Rank]]) -> None:
    ranks = start_ranks(4.0)
    ranks[first].send("end")
    assert ranks[first].process.wait(ENDS_WITHIN_S) == 0
    other = ranks[1 - first]
    other.send("outlive", "end")
    assert other.process.wait(ENDS_WITHIN_S) == 0, other.output
    assert "silent" not in other.output


def test_collectives_outlast_waits_of_rank_0() -> None:
    join_world(root_waits_s=5000.0)
    try:
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout > timedelta(seconds=5000)
    finally:
        leave_world()
