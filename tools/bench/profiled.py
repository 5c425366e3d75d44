"""Runs a module under a profiler that counts its main thread's CPU time: `profiled OUT MODULE ARGUMENTS...`."""

import cProfile
import pstats
import runpy
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

PARTS = {
    "decode, check": ("buffer/wire/codec", "buffer/arrival", "msgspec"),
    "filters, sampler": ("buffer/policies", "numpy"),
    "service, ledger": ("buffer/service", "buffer/ledger", "buffer/store", "buffer/client", "json/", "bench/producer"),
    "redis client": ("/redis/", "hiredis"),
    "zmq": ("/zmq/", "zmq."),
    "event loop, kernel": ("asyncio", "uvloop", "socket", "select", "poll"),
}
"""Which part of the work a function belongs to, by what its file or its name contains; the first that fits."""


def shares(profile: Path) -> dict[str, float]:
    """Each part's share of the profiled CPU time, by its functions' own time."""
    stats: Mapping[tuple[str, int, str], tuple[int, int, float, float, object]]
    stats = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    own: Counter[str] = Counter()
    for (file, _, name), (_, _, own_s, _, _) in stats.items():
        own[_part(f"{file} {name}")] += own_s  # type: ignore[assignment]
    total = sum(own.values())
    return {part: own_s / total for part, own_s in own.most_common()}


def _part(function: str) -> str:
    for part, words in PARTS.items():
        if any(word in function for word in words):
            return part
    return "other"


def main() -> None:
    """Entry point."""
    out, module = sys.argv[1:3]
    sys.argv = [module, *sys.argv[3:]]
    profiler = cProfile.Profile(time.thread_time)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # what doesn't handle it itself still leaves its profile
    try:
        profiler.runcall(runpy.run_module, module, run_name="__main__")
    finally:
        profiler.dump_stats(out)


if __name__ == "__main__":
    main()
