"""Kills what a process leaves behind, however it ends. Linux only (it reads /proc).

Runs as a bare script too, so it imports nothing but the standard library:

- `python -I -S guard.py MARKER` hears on stdin of process groups (`+<group>` started, `-<group>` gone), and kills what
  is left of them when stdin ends, as it does however the process ends that holds it.
- `python -I -S guard.py MARKER PARENT COMMAND…` becomes the command, guarded.

A marker is a variable, `NAME=value`, that is in the environment of all that belong together.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_TRACKER = b"resource_tracker"
_TRACKERS_S = 2.0
"""How long Python's resource trackers may take to free the shared memory of those that were killed."""


def guard_this_process(marker: str, parent: int) -> None:
    """When this process or its parent has ended, all that is left of it and of what it starts from now on is killed.

    It becomes the leader of a session, if it isn't one: Ctrl-C in the terminal is not meant for it.
    """
    process = os.getpid()
    if os.getsid(0) != process:
        os.setsid()
    if os.fork() == 0:
        try:
            _keep_watch(parent, process, os.fsencode(marker))
        finally:
            os._exit(1)  # whatever happens: it must not go on as the guarded process does
    if os.getppid() != parent:  # it has ended, and its id may be another's by now
        os._exit(1)
    name, _, value = marker.partition("=")
    os.environ[name] = value


def living_members(groups: Collection[int], marker: bytes) -> dict[int, bytes]:
    """The processes in one of the groups, or with `marker` in their environment, by their ids: their command lines.

    The group finds those that overwrote their environment (as setproctitle does), the marker those that left the group.
    """
    assert marker, "an empty marker would match every process"
    members = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or belongs to someone else
            # The command's name comes before and may hold spaces: "pid (name) state parent group ..."
            state, _, group = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            if state not in "ZX" and (int(group) in groups or marker in (folder / "environ").read_bytes()):
                members[int(folder.name)] = (folder / "cmdline").read_bytes()
    return members


def signal_members(groups: Collection[int], marker: bytes, number: signal.Signals) -> None:
    """Sends a signal to each of the living members."""
    for process in living_members(groups, marker):
        with suppress(ProcessLookupError):
            os.kill(process, number)


def kill_members(groups: Collection[int], marker: bytes, *, deadline_s: float = 5.0) -> list[int]:
    """Kills until none is left, because a process may fork while it is being listed; resource trackers last.

    Returns what is left at the deadline: SIGKILL does not end a process that waits for a dead disk.
    """
    began = time.monotonic()
    while (members := living_members(groups, marker)) and time.monotonic() < began + deadline_s:
        spares_trackers = time.monotonic() < began + min(_TRACKERS_S, deadline_s / 2)
        for process, command in members.items():
            if not (spares_trackers and _TRACKER in command):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return list(members)


def _keep_watch(parent: int, process: int, marker: bytes) -> None:
    os.setsid()  # it is no member
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the guarded process, which may take its time to end
    for file in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # that of the folder itself
            os.close(int(file.name))  # who waits for its end waits for the guarded process alone
    with suppress(ProcessLookupError):  # one of them has ended already
        select.select([os.pidfd_open(parent), os.pidfd_open(process)], [], [])
    kill_members([process], marker)


def _hear_of_groups(marker: bytes) -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        change, group = line[0], int(line[1:])
        if change == "+":
            groups.add(group)
        else:
            groups.discard(group)
    kill_members(groups, marker)


def main() -> None:
    """Becomes the command, guarded; without one, hears of groups."""
    marker, *rest = sys.argv[1:]
    if rest:
        parent, *command = rest
        guard_this_process(marker, int(parent))
        os.execvp(command[0], command)
    _hear_of_groups(os.fsencode(marker))


if __name__ == "__main__":
    main()


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def raise_malloc_thresholds() -> None:
    """Keeps freed blocks up to 1 GiB in the process: glibc returns each to the kernel, whose page faults cost more than
    the arithmetic of a small model. No effect on other C libraries."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def raise_open_file_limit() -> None:
    """Raises this process's limit of open files as far as it may.

    A buffer takes three for each rollout server, an engine's server one for each sample; 1,024 is a common limit.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
