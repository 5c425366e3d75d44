"""A learner rank that takes commands, a line each: `barrier`, `outlive` (the deadline), `end`.

Arguments: DEADLINE_S RANK PORT COMMANDS, the port of the store and the path of a pipe
"""

import os
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream.learner.cli import end_process
from slipstream.learner.parallel import watchdog
from slipstream.learner.parallel.mesh import join_world, leave_world


def main() -> None:
    """Confirms each command that it has carried out."""
    deadline_s, rank, port, pipe = float(sys.argv[1]), *sys.argv[2:]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": rank,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    watchdog.HEARTBEAT_S, watchdog.WARNING_S = 0.1, 1.0
    torch.set_num_threads(1)
    world = join_world()
    with Path(pipe).open() as commands, watchdog.watch_ranks(world, deadline_s=deadline_s):
        write("ready")
        while (command := commands.readline().strip()) != "end":
            if command == "barrier":
                world.barrier()
            else:
                with suppress(dist.DistStoreError):
                    world.store.wait(["never set"], timedelta(seconds=1.5 * deadline_s))
            write(command)
    leave_world()
    end_process(0)


def write(line: str) -> None:
    """Writes a line to the test."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
