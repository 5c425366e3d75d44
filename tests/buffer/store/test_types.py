"""The check that every step was trained on its number of groups."""

import pytest

from slipstream.buffer.store.types import MOST_PROBLEMS, StepTally, check_steps


@pytest.mark.parametrize(
    ("groups", "wrong"),
    [({0: 4, 1: 3, 2: 4}, "step 1 was trained on 3"), ({0: 4, 2: 4}, "step 1 was trained on 0"),
     ({0: 5}, "step 0 was trained on 5")],
)  # fmt: skip
def test_step_with_wrong_group_count_is_named(groups: dict[int, int], wrong: str) -> None:
    (problem,) = check_steps(StepTally(-1, groups), groups_per_step=4).problems
    assert wrong in problem
    assert "learner.groups_per_step=4" in problem


@pytest.mark.parametrize("groups", [{}, {0: 4, 1: 4, 2: 4}])
def test_full_steps_are_sound(groups: dict[int, int]) -> None:
    check = check_steps(StepTally(-1, groups), groups_per_step=4)
    assert (check.problems, check.forgotten_step) == ([], -1)


def test_forgotten_steps_are_not_checked() -> None:
    check = check_steps(StepTally(1, {1: 2, 2: 4, 3: 4}), groups_per_step=4)
    assert (check.problems, check.forgotten_step) == ([], 1)
    assert check_steps(StepTally(1, {1: 2, 2: 3, 3: 4}), groups_per_step=4).problems != []


def test_problem_count_is_bounded() -> None:
    problems = check_steps(StepTally(-1, {10**12: 4}), groups_per_step=4).problems
    assert len(problems) == MOST_PROBLEMS
