"""CPU time of processes and their threads, from /proc. Linux only."""

import os
from collections import defaultdict
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def thread_cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds of a process's threads so far, by their names; threads of one name together."""
    used: defaultdict[str, float] = defaultdict(float)
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
        fields = rest.split()
        used[name] += (int(fields[11]) + int(fields[12])) * _TICK_S
    return used


def resident_bytes(pid: int) -> int:
    """Physical memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
