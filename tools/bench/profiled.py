"""Runs a module under a profiler that counts its main thread's CPU time: `profiled OUT MODULE ARGUMENTS...`."""

import cProfile
import importlib
import pstats
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

OTHER = "other"
START = "start"
"""What a process does before it serves: none of a group's time."""
PARTS = {
    START: ("/yaml/", "/configs/", "pydantic", "importlib", "argparse", "/re/"),
    "decode, check": ("buffer/wire/codec", "buffer/arrival", "msgspec"),
    "filters, sampler": ("buffer/policies", "numpy"),
    "service, ledger": ("/buffer/", "json/", "bench/producer"),
    "redis client": ("/redis/", "hiredis"),
    "zmq": ("/zmq/", "zmq."),
    "event loop, kernel": ("asyncio", "uvloop", "socket", "select", "poll"),
}
"""Which part of the work a function belongs to, by what its file or its name contains; the first that fits."""

BUILT_IN = "~"
"""What the profiler names as the file of functions that are not Python's."""

Function = tuple[str, int, str]
"""File, line, name."""


def shares(profile: Path) -> dict[str, float]:
    """Each part's share of the profiled CPU time; what is built in counts for whoever calls it."""
    stats: Mapping[Function, tuple[int, int, float, float, Mapping[Function, tuple[int, int, float, float]]]]
    stats = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    own: defaultdict[str, float] = defaultdict(float)
    for function, (_, _, own_s, _, callers) in stats.items():
        part = _part(function)
        if part == OTHER and function[0] == BUILT_IN and callers:
            for caller, (_, _, for_caller_s, _) in callers.items():
                own[_part(caller)] += for_caller_s
        else:
            own[part] += own_s
    own.pop(START, None)
    total = sum(own.values())
    return {part: own_s / total for part, own_s in own.items()}


def _part(function: Function) -> str:
    file, _, name = function
    for part, words in PARTS.items():
        if any(word in f"{file} {name}" for word in words):
            return part
    return OTHER


def main() -> None:
    """Entry point."""
    out, module = sys.argv[1:3]
    sys.argv = [module, *sys.argv[3:]]
    main_of_module = importlib.import_module(module).main  # what it imports is none of the profile
    profiler = cProfile.Profile(time.thread_time)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # what doesn't handle it itself still leaves its profile
    try:
        profiler.runcall(main_of_module)
    finally:
        profiler.dump_stats(out)


if __name__ == "__main__":
    main()
