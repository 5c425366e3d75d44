"""Whether the service's memory stays as it is, however many groups go through."""

from typing import cast

from slipstream.tools.bench.cpu import resident_bytes
from slipstream.tools.bench.figures import Figure, Goal
from slipstream.tools.bench.passage import line
from slipstream.tools.bench.stage import Stage, whole_steps

ANSWERS = 2
TOKENS = 16
BOUND_BYTES = 64
"""Less than what a single entry of a dict costs that is kept for each group."""


def memory(stage: Stage, *, groups: int) -> list[Figure]:
    """Growth per group of the service's resident memory, and of what Redis holds, after a quarter more as warm-up."""
    warm, measured = (whole_steps(count) for count in (groups / 4, groups))
    with line(stage, stage.config(group_size=ANSWERS)) as road, stage.client() as redis:
        sizes = []
        for count in (warm, measured):
            road.passage(count, answers=ANSWERS, tokens=TOKENS)
            held = cast(dict[str, int], redis.info("memory"))["used_memory_dataset"]
            sizes.append((resident_bytes(road.service_pid), held))
    (before, held_before), (after, held_after) = sizes
    return [
        Figure("groups through the service", measured, ""),
        Figure("service's memory, at the end", after / 1e6, "MB"),
        Figure("service's memory, growth", (after - before) / measured, "B/group", Goal("<", BOUND_BYTES)),
        Figure("Redis's data, growth", (held_after - held_before) / measured, "B/group"),
    ]
