"""Runs a command that neither outlives the process that started it nor leaves children behind. Linux only.

`python -I -S guard.py PARENT COMMAND…`, as the leader of a process group of its own. A bare script, so it imports
nothing but the standard library. The command takes the place of this process; a fork of it waits until the command or
the parent has ended, however that happened, and kills what is left of the group: Python's resource trackers last, which
free the shared memory of those that were killed.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_TRACKER = b"resource_tracker"
_TRACKERS_S = 2.0
"""How long trackers may take."""


def keep_watch(*pidfds: int) -> None:
    """Waits for the end of one of the processes, then kills this process's group."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the command, which may take its time to end
    select.select(pidfds, [], [])
    deadline = time.monotonic() + _TRACKERS_S
    while (others := members(os.getpgid(0), but=os.getpid())) and time.monotonic() < deadline:
        for process, command in others.items():
            if _TRACKER not in command:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    os.killpg(0, signal.SIGKILL)


def members(group: int, *, but: int = 0) -> dict[int, bytes]:
    """The processes of a group that have not ended, by their ids: their command lines; without one of them."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        process = int(folder.name)
        with suppress(OSError):  # it is gone
            command = (folder / "cmdline").read_bytes()
            if command and process != but and os.getpgid(process) == group:  # who has ended has no command line
                found[process] = command
    return found


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
