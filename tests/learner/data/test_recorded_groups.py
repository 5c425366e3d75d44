"""Pairs and returns from the groups that a run has kept."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from slipstream.buffer.store.kept import KeptGroups
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import action_mask, encode_group, token_ids
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.data.preferences import GROUP, best_and_worst, returns_of, sequence_of
from slipstream.learner.data.recorded_groups import RecordedGroups
from tests.learner.recorded import trajectory


def group(name: str, rewards: Sequence[float], episodes: Sequence[int] | None = None) -> m.Group:
    """A group whose trajectories have these rewards, and are of these episodes."""
    rng = np.random.default_rng(len(name))
    numbers = range(len(rewards)) if episodes is None else episodes
    made = [
        msgspec.structs.replace(trajectory(rng, tokens=9, episode=number), reward=reward)
        for number, reward in zip(numbers, rewards, strict=True)
    ]
    return m.Group(id=name, kind=m.TRAIN, epoch=0, indices=[0], trajectories=made)


def keep(run: Path, *steps: Sequence[m.Group]) -> None:
    kept = KeptGroups(RunPaths(run).kept_groups)
    for number, groups in enumerate(steps, start=1):
        kept.write(number, 0, {each.id: encode_group(each) for each in groups})


def test_best_and_worst_are_the_first_of_their_rewards() -> None:
    given = group("1", [0.5, 1.0, 0.0, 1.0, 0.0])
    pair = best_and_worst(given)
    assert pair is not None
    assert (pair.chosen, pair.rejected) == (given.trajectories[1], given.trajectories[2])
    assert pair.margin == 1.0


@pytest.mark.parametrize(
    ("rewards", "episodes"), [([1.0, 1.0], None), ([1.0], None), ([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1])]
)
def test_group_without_spread_or_of_broken_episodes_has_no_pair(
    rewards: Sequence[float], episodes: Sequence[int] | None
) -> None:
    assert best_and_worst(group("1", rewards, episodes)) is None


def test_groups_of_a_run_come_once_and_in_order(tmp_path: Path) -> None:
    first, second, third = group("7", [0.0, 1.0]), group("3", [1.0, 1.0]), group("5", [0.25, 0.0])
    keep(tmp_path, [first, second], [first, third])
    groups = RecordedGroups(tmp_path, pairs=False)
    assert [row[GROUP] for row in groups.scan()] == [first, second, third]
    pairs = RecordedGroups(tmp_path, pairs=True)
    assert [pairs.row(index)[GROUP].id for index in range(len(pairs))] == ["7", "5"]
    assert "5" in pairs.place(1)


def test_unreadable_groups_and_those_without_spread_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_trained"):
        RecordedGroups(tmp_path, pairs=True)
    keep(tmp_path, [group("1", [1.0, 1.0])], [group("2", [1.0, 0.0])])
    KeptGroups(RunPaths(tmp_path).kept_groups).write(3, 0, {"3": b"no group"})
    file = next(RunPaths(tmp_path).kept_groups.glob("step-000000002-*"))
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=r"1 groups without spread, 1 damaged steps, 1 unreadable groups"):
        RecordedGroups(tmp_path, pairs=True)
    assert len(RecordedGroups(tmp_path, pairs=False)) == 1


def test_returns_are_the_rewards_still_to_come() -> None:
    rng = np.random.default_rng(1)
    one = trajectory(rng, tokens=9)  # actions 3 to 8
    turns = msgspec.structs.replace(
        one, reward=1.0, rewards=[m.RewardSpan(end=5, value=0.25), m.RewardSpan(end=7, value=0.5)]
    )
    given = group("1", [0.0, 0.5])
    given = msgspec.structs.replace(given, trajectories=[turns, given.trajectories[1]])
    found = returns_of(given)
    assert found[0].tolist() == [1.0, 1.0, 0.75, 0.75, 0.25, 0.25]
    assert found[1].tolist() == [0.5] * 6
    sequence = sequence_of(turns)
    assert sequence.token_ids.tolist() == token_ids(turns).tolist()
    assert sequence.action_mask.tolist() == action_mask(turns).tolist()
