"""The queue that forces the lag."""

from collections.abc import Sequence

import pytest

from slipstream.buffer.wire.messages import TRAIN, Group
from slipstream.tools.bench.staleness.held_back import HeldBack


def one_group(version: int) -> list[Group]:
    """A step's groups that tell the version that they were generated with."""
    return [Group(id=str(version), kind=TRAIN, epoch=0, indices=[0], trajectories=[])]


def versions(held_back: HeldBack, lags: Sequence[int]) -> list[int]:
    """Which version's groups each step trains on."""
    return [int(held_back.take(version, lag=lag)[0].id) for version, lag in enumerate(lags)]


def test_without_a_lag_each_step_trains_on_what_its_own_weights_generated() -> None:
    assert versions(HeldBack(one_group), [0] * 4) == [0, 1, 2, 3]


def test_what_the_weights_after_step_s_generated_is_trained_on_at_step_s_plus_k() -> None:
    assert versions(HeldBack(one_group), [3] * 8) == [0, 0, 0, 0, 1, 2, 3, 4]


def test_a_lag_that_falls_drops_the_oldest_groups_and_one_that_rises_comes_back_step_by_step() -> None:
    held_back = HeldBack(one_group)
    assert versions(held_back, [4] * 6 + [2] * 2 + [3] + [4] * 5) == [0, 0, 0, 0, 0, 1, 4, 5, 6, 7, 8, 8, 9, 9]
    assert held_back.dropped == 2


@pytest.mark.parametrize("lags", [[5, 0, 5, 5, 5, 5, 5, 5], [0, 7, 7, 1, 3], [3, 3, 2, 1, 0]])
def test_no_group_is_older_than_the_lag_in_force_and_each_version_generates(lags: list[int]) -> None:
    asked: list[int] = []

    def generate(version: int) -> list[Group]:
        asked.append(version)
        return one_group(version)

    ages = [version - trained for version, trained in enumerate(versions(HeldBack(generate), lags))]
    assert all(0 <= age <= lag for age, lag in zip(ages, lags, strict=True))
    assert sorted(set(asked)) == list(range(len(lags)))
