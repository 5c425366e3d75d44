"""Kills what a supervisor that died by SIGKILL left behind. Linux only (it reads /proc).

Runs as a bare script, `guard.py MARKER`, so it imports nothing but the standard library. On stdin it hears of
process groups (`+<group>` started, `-<group>` gone). When stdin ends, as it does however the supervisor ends,
it kills what is left of them.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path


def living_members(groups: Collection[int], marker: bytes) -> list[int]:
    """Ids of the running processes in one of the process groups, or with `marker` in their environment.

    The group finds those that overwrote their environment (as setproctitle does), the marker those that left
    the group.
    """
    assert marker, "an empty marker would match every process"
    members = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The command's name comes before and may hold spaces: "pid (name) state parent group ..."
            state, _, group = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            if state in "ZX":
                continue
            if int(group) in groups or marker in (folder / "environ").read_bytes():
                members.append(int(folder.name))
        except OSError:
            continue  # it ended meanwhile, or belongs to someone else
    return members


def signal_members(groups: Collection[int], marker: bytes, number: signal.Signals) -> None:
    """Sends a signal to each of the running members."""
    for pid in living_members(groups, marker):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_members(groups: Collection[int], marker: bytes, *, deadline_s: float = 5.0) -> list[int]:
    """Kills until none is left, because a process may fork while it is being listed.

    Returns what is left at the deadline: SIGKILL does not end a process that waits for a dead disk.
    """
    give_up = time.monotonic() + deadline_s
    while (members := living_members(groups, marker)) and time.monotonic() < give_up:
        signal_members(groups, marker, signal.SIGKILL)
        time.sleep(0.01)
    return members


def main() -> None:
    """Waits for the supervisor's end."""
    groups: set[int] = set()
    for line in sys.stdin:
        change, group = line[0], int(line[1:])
        if change == "+":
            groups.add(group)
        else:
            groups.discard(group)
    kill_members(groups, os.fsencode(sys.argv[1]))


if __name__ == "__main__":
    main()
