"""Process limits, and the guard that kills a tree of processes once its root has ended. Linux only (it reads /proc).

It is run as a script too, so it imports nothing but the standard library:

- `python -I -S processes.py MARKER then COMMAND…` reads process groups from stdin (`+<group>` started, `-<group>`
  gone), and kills the members of those left when stdin closes, as it does however the process ends that holds its other
  end. If any were left, it becomes the command, which frees what they have left.
- `python -I -S processes.py MARKER PARENT COMMAND…` becomes the command, guarded.

A marker is a variable, `NAME=value`, in the environment of all processes that belong together.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_TRACKER = b"resource_tracker"
_TRACKERS_S = 2.0
"""Time for Python's resource trackers to free the shared memory of killed processes."""


def guard_this_process(marker: str, parent: int) -> None:
    """Forks a watcher: when this process or its parent ends, the watcher kills both it and all that it started since.

    This process becomes the leader of a session, if it isn't one: Ctrl-C in the terminal does not reach it.
    """
    process = os.getpid()
    if os.getsid(0) != process:
        os.setsid()
    if os.fork() == 0:
        try:
            _watch(parent, process, os.fsencode(marker))
        finally:
            os._exit(1)  # whatever happens: it must not run the guarded process's code
    if os.getppid() != parent:  # it has ended, and its id may be another's by now
        os._exit(1)
    name, _, value = marker.partition("=")
    os.environ[name] = value


def guarded_command(command: Sequence[str], marker: str) -> list[str]:
    """The command, guarded: it and all that it starts are killed when this process or it ends, however that happens.

    Args:
        marker: `NAME=value`, of this command alone.
    """
    return [sys.executable, "-I", "-S", __file__, marker, str(os.getpid()), *command]


def die_with_parent() -> Callable[[], None]:
    """`preexec_fn` of a child of this process, by which the kernel kills it when the thread that started it ends."""
    parent = os.getpid()
    libc = ctypes.CDLL(None)  # loaded here: a forked child must not load libraries

    def ask_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the line above
            os.kill(os.getpid(), signal.SIGKILL)

    return ask_kernel


def die_with(process: int, *, starter: int | None = None) -> None:
    """Kills this process, and its parent `starter` if given, once another process has ended.

    A thread waits for that: `die_with_parent` would act when the thread ends that started this process.
    """

    def wait_and_kill() -> None:
        with suppress(ProcessLookupError):  # it has ended already
            select.select([os.pidfd_open(process)], [], [])
        if starter is not None and os.getppid() == starter:  # whoever inherited an orphan is not to be killed
            os.kill(starter, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_and_kill, name="die with", daemon=True).start()


def living_members(groups: Collection[int], marker: bytes) -> dict[int, bytes]:
    """Command lines of the processes in one of the groups, or with `marker` in their environment, by process id.

    The group finds those that overwrote their environment (as setproctitle does), the marker those that left the group.
    """
    assert marker, "an empty marker would match every process"
    members = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            # The command's name comes before and may hold spaces: "pid (name) state parent group ..."
            state, _, group = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            if state not in "ZX" and (int(group) in groups or marker in (folder / "environ").read_bytes()):
                members[int(folder.name)] = (folder / "cmdline").read_bytes()
    return members


def signal_members(groups: Collection[int], marker: bytes, number: signal.Signals) -> None:
    """Sends a signal to each living member."""
    for process in living_members(groups, marker):
        with suppress(ProcessLookupError):
            os.kill(process, number)


def kill_members(groups: Collection[int], marker: bytes, *, deadline_s: float = 5.0) -> list[int]:
    """Kills until no member is left, because a process may fork while it is being listed; resource trackers last.

    Returns: the members left at the deadline. SIGKILL does not end a process that waits for a dead disk.
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


def raise_malloc_thresholds() -> None:
    """Keeps freed blocks of up to 1 GiB in the process: glibc would return each to the kernel, whose page faults cost
    more than the arithmetic of a small model. No effect on other C libraries."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def raise_open_file_limit() -> None:
    """Raises this process's limit of open files to the hard limit.

    A buffer opens three for each rollout server, an engine's server one for each sample; 1,024 is a common soft limit.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _watch(parent: int, process: int, marker: bytes) -> None:
    os.setsid()  # the watcher is no member
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the guarded process handles them, and its clean-up may take a while
    for file in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # that of the folder itself
            os.close(int(file.name))  # pipes must close with the guarded process, not with its watcher
    with suppress(ProcessLookupError):  # one of them has ended already
        select.select([os.pidfd_open(parent), os.pidfd_open(process)], [], [])
    kill_members([process], marker)


def _read_groups(marker: bytes) -> set[int]:
    """Kills the groups that are left when stdin closes, and returns them."""
    groups: set[int] = set()
    for line in sys.stdin:
        change, group = line[0], int(line[1:])
        if change == "+":
            groups.add(group)
        else:
            groups.discard(group)
    kill_members(groups, marker)
    return groups


def main() -> None:
    """Guards the groups on stdin, or becomes the command, guarded."""
    marker, parent, *command = sys.argv[1:]
    if parent != "then":
        guard_this_process(marker, int(parent))
        os.execvp(command[0], command)
    if _read_groups(os.fsencode(marker)):
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
