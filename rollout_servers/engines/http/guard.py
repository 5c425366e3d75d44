"""Runs a command that neither outlives the process that started it nor leaves children behind. Linux only.

`python -I -S guard.py PARENT COMMAND…`, as the leader of a process group of its own. A bare script, so it imports
nothing but the standard library. The command takes the place of this process; a fork of it waits until the command or
the parent has ended, however that happened, and kills what is left of the group.
"""

import os
import select
import signal
import sys


def keep_watch(*pidfds: int) -> None:
    """Waits for the end of one of the processes, then kills this process's group."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the command, which may take its time to end
    select.select(pidfds, [], [])
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Becomes the command, guarded."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    pidfds = os.pidfd_open(parent), os.pidfd_open(os.getpid())
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    if os.fork() == 0:
        keep_watch(*pidfds)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
