"""A learner rank that takes commands, a line each: `barrier`, `outlive` (the deadline), `end`.

python -m tests.learner.parallel.waiting_rank DEADLINE_S
"""

import sys
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from slipstream.learner.cli import end_process
from slipstream.learner.parallel import watchdog
from slipstream.learner.parallel.mesh import join_world, leave_world


def main(deadline_s: float) -> None:
    """Confirms each command that it has carried out."""
    watchdog.HEARTBEAT_S, watchdog.WARNING_S = 0.1, 1.0
    torch.set_num_threads(1)
    world = join_world()
    with watchdog.watch_ranks(world, deadline_s=deadline_s):
        write("ready")
        while (command := sys.stdin.readline().strip()) != "end":
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


if __name__ == "__main__":
    main(float(sys.argv[1]))
