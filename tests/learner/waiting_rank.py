"""A learner rank that does as it is told, a line at a time: `meet` the others, `outlive` the deadline, `end`.

python -m tests.learner.waiting_rank DEADLINE_S
"""

import sys
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from slipstream.learner.parallel import watchdog as pulse
from slipstream.learner.parallel.mesh import join_world, leave_world
from slipstream.learner.process import end_process


def main(deadline_s: float) -> None:
    """Says what it has done."""
    pulse.BEAT_S, pulse.SAY_EVERY_S = 0.1, 1.0
    torch.set_num_threads(1)
    world = join_world()
    with pulse.pulse(world, deadline_s=deadline_s):
        say("ready")
        while (told := sys.stdin.readline().strip()) != "end":
            if told == "meet":
                world.barrier()
            else:
                with suppress(dist.DistStoreError):
                    world.store.wait(["what nobody says"], timedelta(seconds=1.5 * deadline_s))
            say(told)
    leave_world()
    end_process(0)


def say(what: str) -> None:
    """To whoever started it."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
