"""A curriculum by success: tasks that are always or never solved are skipped with a fixed probability in each epoch.

A group without spread of rewards has no group-relative advantage. A task's streak is the number of its latest groups in
a row that were all solved (positive) or all unsolved (negative). From `after_groups` on, either way, the task is
skipped with probability 1 - `issue_probability`: its outcome may change as the policy does, so it must come again.

Streaks are those of delivered groups at the time of the grant. The draws depend on seed, epoch and position only.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slipstream.configs.schema.buffer import CurriculumConfig

Place = tuple[int, int]
"""A task as its epoch and its position in the epoch's order."""

SLACK = 4
"""Places that a grant looks at, over those that it needs on average if every task has a streak. The places beyond are
issued whatever their streaks are: with one ticket, exp(-4) = 2 % of such grants."""
MOST_PLACES = 10_000
"""Reading as many streaks takes Redis a few milliseconds."""


def upcoming(cursor: Place, *, tickets: int, train_tasks: int, curriculum: CurriculumConfig) -> list[Place]:
    """The next places of the cursor, of which a grant of `tickets` tickets may skip some.

    Bounded by one epoch, beside the places of the tickets, and by MOST_PLACES: where all of them are skipped, the
    tickets are for the places behind them.
    """
    epoch, position = cursor
    needed = math.ceil(SLACK * tickets / curriculum.issue_probability)
    first = epoch * train_tasks + position
    return [
        divmod(place, train_tasks) for place in range(first, first + min(needed, tickets + train_tasks, MOST_PLACES))
    ]


def skipped(
    places: Sequence[Place], streaks: Sequence[int], *, train_tasks: int, seed: int, curriculum: CurriculumConfig
) -> list[Place]:
    """Those of the places whose task is skipped.

    Args:
        streaks: of the task at each place.
    """
    return [
        (epoch, position)
        for (epoch, position), streak in zip(places, streaks, strict=True)
        if abs(streak) >= curriculum.after_groups
        and _draws(train_tasks, seed=seed, epoch=epoch)[position] >= curriculum.issue_probability
    ]


@lru_cache(maxsize=4)
def _draws(tasks: int, *, seed: int, epoch: int) -> NDArray[np.float64]:
    """A uniform random number in [0, 1) for each position of an epoch, shape [tasks]."""
    # The third entry makes them independent of the epoch's order (`task_order`).
    return np.random.default_rng([seed, epoch, 1]).random(tasks)
