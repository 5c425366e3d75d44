"""Whether every step had its groups."""

import pytest

from slipstream.buffer.store.types import MOST_PROBLEMS, StepTally, check_steps


def test_full_steps_are_sound() -> None:
    check = check_steps(StepTally(-1, {0: 4, 1: 4, 2: 4}), groups_per_step=4)
    assert (check.problems, check.forgotten_step) == ([], -1)


def test_a_run_that_has_not_trained_is_sound() -> None:
    assert check_steps(StepTally(-1, {}), groups_per_step=4).problems == []


@pytest.mark.parametrize(
    ("groups", "wrong"),
    [({0: 4, 1: 3, 2: 4}, "step 1 was trained on 3 groups"), ({0: 4, 2: 4}, "step 1 was trained on 0 groups"),
     ({0: 5}, "step 0 was trained on 5 groups")],
)  # fmt: skip
def test_a_step_with_another_number_of_groups_is_named(groups: dict[int, int], wrong: str) -> None:
    (problem,) = check_steps(StepTally(-1, groups), groups_per_step=4).problems
    assert problem == f"{wrong}, but learner.groups_per_step=4"


def test_steps_up_to_the_last_forgotten_one_are_not_judged() -> None:
    check = check_steps(StepTally(1, {1: 2, 2: 4, 3: 4}), groups_per_step=4)
    assert (check.problems, check.forgotten_step) == ([], 1)
    assert check_steps(StepTally(1, {1: 2, 2: 3, 3: 4}), groups_per_step=4).problems != []


def test_nonsense_in_redis_does_not_fill_the_memory() -> None:
    problems = check_steps(StepTally(-1, {10**12: 4}), groups_per_step=4).problems
    assert len(problems) == MOST_PROBLEMS
