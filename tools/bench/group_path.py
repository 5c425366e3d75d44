"""How fast groups go through, against the bare SET and MGET of the same bytes; how late one is; where the time goes."""

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median, quantiles
from typing import Any

from slipstream.buffer.wire.codec import encode
from slipstream.buffer.wire.messages import TRAIN, Group
from slipstream.tools.bench.figures import Figure, Goal
from slipstream.tools.bench.passage import Passage, Profiles, line
from slipstream.tools.bench.producer import trajectories
from slipstream.tools.bench.profiled import shares
from slipstream.tools.bench.stage import GROUPS_PER_STEP, Stage, whole_steps

ANSWERS = 8
TOKENS = 1024
FEW_PER_S = 100.0
"""More than 800,000 tokens a second."""


def throughput(stage: Stage, *, groups: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """Groups per second, medians of rounds that alternate with the bare commands; and the passages' shares."""
    blob = _blob()
    bare: list[float] = []
    passages: list[Passage] = []
    with line(stage, stage.config()) as road:
        road.passage(GROUPS_PER_STEP, answers=ANSWERS, tokens=TOKENS)  # warm
        for _ in range(rounds):
            bare.append(_bare_groups_per_s(stage, blob, groups))
            passages.append(road.passage(groups, answers=ANSWERS, tokens=TOKENS))
    found = [passage.groups_per_s for passage in passages]
    cpu_us = _cpu_us(passages) | {"redis in scripts (wall)": _script_us(passages)}
    figures = [
        Figure("group path, groups", median(found), "/s"),
        Figure("group path, bytes", median(found) * len(blob) / 1e6, "MB/s"),
        Figure("bare SET and MGET, bytes", median(bare) * len(blob) / 1e6, "MB/s"),
        Figure("group path / bare", median(found) / median(bare), "", Goal(">=", 0.6)),
        *(Figure(f"  CPU of {part}", used_us, "µs/group") for part, used_us in cpu_us.items() if used_us >= 1),
    ]
    return figures, {"groups_per_s": found, "bare_groups_per_s": bare, "cpu_us": cpu_us, "group_bytes": len(blob)}


def where_the_time_goes(stage: Stage, *, groups: int, cpu_us: Mapping[str, float]) -> list[Figure]:
    """What each Python process's main thread does, as shares of all CPU time, from a passage under a profiler."""
    service, producer, consumer = (stage.folder / f"{who}.profile" for who in ("service", "producer", "consumer"))
    profiles = Profiles(service, producer, consumer)
    with line(stage, stage.config(), profiles=profiles) as road:
        road.passage(groups, answers=ANSWERS, tokens=TOKENS, profiles=profiles)
    total_us = sum(used_us for part, used_us in cpu_us.items() if "(wall)" not in part)
    found = {
        f"{who}: {part}": share * sum(used for thread, used in cpu_us.items() if _is_main(thread, who)) / total_us
        for who, file in asdict(profiles).items()
        for part, share in shares(file).items()
    }
    found |= {thread: used / total_us for thread, used in cpu_us.items() if thread.startswith("redis,")}
    found |= {thread: used / total_us for thread, used in cpu_us.items() if "ZMQ" in thread}
    return [
        Figure(f"  {part}", 100 * share, "% of CPU")
        for part, share in sorted(found.items(), key=_share, reverse=True)
        if share > 0.005
    ]


def latency(stage: Stage, *, groups_per_s: float, seconds: float) -> list[Figure]:
    """How late groups are stored that come one by one at random times: half as many as go through at most, and few.

    From the time that the producer has a group's last token to the service's word, back at the producer, that it is
    ready; beside it, the same of a bare SET.
    """
    figures = []
    half = groups_per_s / 2
    for load, rate, goal in (("half load", half, Goal("<", 20)), (f"{FEW_PER_S:g}/s", FEW_PER_S, None)):
        groups = whole_steps(rate * seconds)
        os.sync()  # gigabytes may have been written just before, and what is still to be put on the disk is in the way
        with line(stage, stage.config()) as road:
            road.passage(GROUPS_PER_STEP, answers=ANSWERS, tokens=TOKENS)  # warm
            found = road.passage(groups, answers=ANSWERS, tokens=TOKENS, rate=rate).report.latencies_s
        bare = _bare_latencies_s(stage, _blob(), groups, rate)
        figures += [
            Figure(f"last token to ready at {load}, median", 1000 * median(found), "ms"),
            Figure(f"last token to ready at {load}, p99", 1000 * _p99(found), "ms", goal),
            Figure(f"bare SET at {load}, p99", 1000 * _p99(bare), "ms"),
        ]
    return figures


def _blob() -> bytes:
    return encode(Group(id="1", kind=TRAIN, epoch=0, indices=[0], trajectories=trajectories(ANSWERS, TOKENS, 0)))


def _bare_groups_per_s(stage: Stage, blob: bytes, groups: int) -> float:
    """Pipelined SET, then MGET, a step's groups at a time."""
    keys = [f"bare:{number}" for number in range(GROUPS_PER_STEP)]
    with stage.client() as redis:
        started = time.monotonic()
        for _ in range(groups // GROUPS_PER_STEP):
            stage.go_on()
            pipeline = redis.pipeline(transaction=False)
            for key in keys:
                pipeline.set(key, blob)
            pipeline.execute()
            redis.mget(keys)
        seconds = time.monotonic() - started
        redis.delete(*keys)
    return groups / seconds


def _bare_latencies_s(stage: Stage, blob: bytes, groups: int, rate: float) -> list[float]:
    rng = random.Random(0)
    found = []
    with stage.client() as redis:
        due = time.monotonic()
        for number in range(groups):
            stage.go_on()
            due += rng.expovariate(rate)
            time.sleep(max(0.0, due - time.monotonic()))
            redis.set(f"bare:{number % GROUPS_PER_STEP}", blob)
            found.append(time.monotonic() - due)
    return found


def _cpu_us(passages: Sequence[Passage]) -> dict[str, float]:
    """CPU microseconds per group by process and thread."""
    groups = sum(passage.groups for passage in passages)
    parts = sorted({part for passage in passages for part in passage.cpu_s})
    return {part: 1e6 * sum(passage.cpu_s.get(part, 0.0) for passage in passages) / groups for part in parts}


def _script_us(passages: Sequence[Passage]) -> float:
    scripts_s = sum(passage.commands_s.get("evalsha", 0.0) for passage in passages)
    return 1e6 * scripts_s / sum(passage.groups for passage in passages)


def _share(item: tuple[str, float]) -> float:
    return item[1]


def _is_main(thread: str, who: str) -> bool:
    return thread.startswith(who) and "ZMQ" not in thread


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100)[98]
