"""The order of tasks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.policies.sampling import task_order

seeds = st.integers(0, 2**31)


@given(tasks=st.integers(1, 200), seed=seeds, epoch=st.integers(0, 1000))
def test_an_epoch_issues_every_task_exactly_once(tasks: int, seed: int, epoch: int) -> None:
    assert sorted(task_order(tasks, seed=seed, epoch=epoch)) == list(range(tasks))


@given(seed=seeds, epoch=st.integers(0, 1000))
def test_the_order_differs_from_epoch_to_epoch_and_from_seed_to_seed(seed: int, epoch: int) -> None:
    order = task_order(100, seed=seed, epoch=epoch)
    assert not np.array_equal(order, task_order(100, seed=seed, epoch=epoch + 1))
    assert not np.array_equal(order, task_order(100, seed=seed + 1, epoch=epoch))


def test_a_service_that_starts_anew_continues_in_the_same_order() -> None:
    before = task_order(10, seed=3, epoch=2)
    task_order.cache_clear()
    assert np.array_equal(before, task_order(10, seed=3, epoch=2))
    # Frozen: a run that goes on after an upgrade must not repeat or skip tasks.
    assert before.tolist() == [7, 4, 1, 8, 6, 0, 2, 9, 3, 5]


def test_nobody_can_change_an_order_that_others_share() -> None:
    order = task_order(10, seed=0, epoch=0)
    with pytest.raises(ValueError, match="read-only"):
        order[0] = order[1]
