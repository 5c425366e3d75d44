"""What becomes of a group on its arrival."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from slipstream.buffer.arrival import arrive
from slipstream.buffer.records import DeliveredGroup
from slipstream.buffer.wire.codec import decode_group, encode
from slipstream.buffer.wire.messages import Group
from slipstream.configs import RunConfig
from tests.buffer.groups import train_group


def run(folder: Path, *filters: Mapping[str, object], advantage: str = "grpo") -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"dir": folder},
            "model": {"build": "digits"},
            "rewards": [{"name": "digit_match"}, {"name": "exact_match"}],
            "buffer": {"filters": filters},
            "learner": {"advantage": advantage},
        }
    )


def arrival(group: Group, config: RunConfig) -> tuple[DeliveredGroup, str | None]:
    return arrive(group, encode(group), config)


def with_baseline(group_id: str) -> Group:
    return msgspec.structs.replace(train_group(group_id), greedy_reward=0.25)


def test_a_group_without_the_baseline_that_its_run_needs_is_dropped_with_all_its_answers_counted(
    tmp_path: Path,
) -> None:
    stored, reason = arrival(train_group("1"), run(tmp_path, advantage="remax"))
    assert reason == "no_baseline"
    assert stored.facts.dropped == {"no_baseline": {2: 2}}
    assert (stored.facts.tokens, stored.facts.kept) == (4, {})


@pytest.mark.parametrize("advantage", ["remax", "grpo"])
def test_a_group_with_its_baseline_is_stored_byte_for_byte(tmp_path: Path, advantage: str) -> None:
    stored, reason = arrival(with_baseline("1"), run(tmp_path, advantage=advantage))
    assert (stored.blob, reason) == (encode(with_baseline("1")), None)


@pytest.mark.parametrize(
    "chosen", [{"name": "pf_ppo", "strategy": "best_of_n", "keep": 3}, {"name": "length", "max_tokens": 2}], ids=str
)
def test_a_filter_that_replaces_the_answers_leaves_the_baseline(tmp_path: Path, chosen: Mapping[str, object]) -> None:
    long = train_group("1", versions=(0, 1)).trajectories
    group = with_baseline("1")
    group = msgspec.structs.replace(group, trajectories=[*group.trajectories, *long])
    stored, reason = arrival(group, run(tmp_path, chosen, advantage="remax"))
    assert reason is None
    kept = decode_group(stored.blob)
    assert kept.greedy_reward == 0.25
    assert kept.trajectories != group.trajectories


def test_a_group_without_the_score_that_a_filter_judges_is_dropped_and_not_an_error(tmp_path: Path) -> None:
    judged = {"name": "dynamic_sampling", "score": "digit_match"}
    stored, reason = arrival(train_group("1"), run(tmp_path, judged))
    assert reason == "no_score"
    assert stored.facts.dropped == {"no_score": {2: 2}}


def test_a_filter_judges_the_score_that_it_is_told_to(tmp_path: Path) -> None:
    right = [
        msgspec.structs.replace(trajectory, scores={"exact_match": 1.0}) for trajectory in train_group("1").trajectories
    ]
    group = msgspec.structs.replace(train_group("1"), trajectories=right)
    config = run(tmp_path, {"name": "dynamic_sampling", "score": "exact_match"})
    assert arrival(train_group("1"), config)[1] is None
    stored, reason = arrival(group, config)
    assert (stored.facts.outcome, reason) == ("solved", "dynamic_sampling")
