"""The curriculum: places that a grant looks at, and those of them that it skips."""

import numpy as np
import pytest

from slipstream.buffer.policies.curriculum import MOST_PLACES, Place, skipped, upcoming
from slipstream.configs.schema.buffer import CurriculumConfig

TASKS = 10_000


def curriculum(after_groups: int = 2, issue_probability: float = 0.25) -> CurriculumConfig:
    return CurriculumConfig(after_groups=after_groups, issue_probability=issue_probability)


def skip(streaks: list[int], *, seed: int = 0, epoch: int = 0, **settings: float) -> list[int]:
    """The positions that are skipped of an epoch of that many tasks."""
    places = [(epoch, position) for position in range(len(streaks))]
    chosen = CurriculumConfig.model_validate(settings) if settings else curriculum()
    found = skipped(places, streaks, train_tasks=len(streaks), seed=seed, curriculum=chosen)
    assert all(each == epoch for each, _ in found)
    return [position for _, position in found]


@pytest.mark.parametrize(
    ("cursor", "tickets", "tasks", "expected"),
    [
        ((0, 3), 2, 5, [(0, 3), (0, 4), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]),
        ((4, 5), 1, 5, [(5, 0), (5, 1), (5, 2), (5, 3), (5, 4), (6, 0)]),
        ((2, 10), 1, 100, [(2, position) for position in range(10, 26)]),
    ],
    ids=["an epoch", "end of an epoch", "by probability"],
)
def test_grant_looks_at_next_places(cursor: Place, tickets: int, tasks: int, expected: list[Place]) -> None:
    assert upcoming(cursor, tickets=tickets, train_tasks=tasks, curriculum=curriculum()) == expected


def test_places_are_bounded() -> None:
    found = upcoming((0, 0), tickets=5000, train_tasks=10**8, curriculum=curriculum(issue_probability=1e-9))
    assert len(found) == MOST_PLACES


@pytest.mark.parametrize("streak", [2, 3, -2, -9])
def test_settled_tasks_are_skipped_with_fixed_probability(streak: int) -> None:
    share = len(skip([streak] * TASKS)) / TASKS
    assert share == pytest.approx(0.75, abs=4 * np.sqrt(0.75 * 0.25 / TASKS))


def test_other_tasks_are_never_skipped() -> None:
    assert set(skip([0, 1, -1, 2, -2] * 1000)) <= {number for number in range(5000) if number % 5 >= 3}
    assert skip([2, -2] * 1000, after_groups=3) == []


def test_draws_depend_on_seed_epoch_and_position_only() -> None:
    streaks = [2] * 100
    first = skip(streaks, seed=3, epoch=1)
    for epoch in range(8):  # more than are cached
        skip(streaks, seed=3, epoch=epoch)
    assert skip(streaks, seed=3, epoch=1) == first
    assert skip([2 if position in first else 0 for position in range(100)], seed=3, epoch=1) == first
    assert skip(streaks, seed=3, epoch=2) != first != skip(streaks, seed=4, epoch=1)
