"""Admission of delivered groups: filters, sampler key, evaluations."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from slipstream.buffer.handlers.inspection import Dropped, EvalSliceResult, Inspector
from slipstream.buffer.store.types import DeliveredGroup, EvalSlice
from slipstream.buffer.wire.codec import decode_group, encode
from slipstream.buffer.wire.messages import EVAL, MAJORITY, Group
from slipstream.configs import RunConfig
from slipstream.configs.schema.buffer import SamplerConfig
from tests.buffer.groups import train_group, trajectory


def run(
    folder: Path,
    *filters: Mapping[str, object],
    advantage: str = "grpo",
    digit_weight: float = 0.0,
    curriculum: object = None,
    eval_samples: int = 1,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"dir": folder}, "model": {"build": "digits"},
            "rewards": [{"name": "exact_match"}, {"name": "digit_match", "weight": digit_weight}],
            "buffer": {"filters": filters, "curriculum": curriculum}, "learner": {"advantage": advantage},
            "eval": {"samples": eval_samples},
        }
    )  # fmt: skip


def stored(group: Group, config: RunConfig) -> DeliveredGroup:
    found = Inspector(config).admit(group, encode(group))
    assert isinstance(found, DeliveredGroup)
    return found


def dropped(group: Group, config: RunConfig) -> Dropped:
    found = Inspector(config).admit(group, encode(group))
    assert isinstance(found, Dropped)
    return found


def with_baseline(group_id: str) -> Group:
    return msgspec.structs.replace(train_group(group_id), greedy_reward=0.25)


def test_group_without_baseline_is_dropped(tmp_path: Path) -> None:
    config = run(tmp_path, advantage="remax")
    # A dropped group has no episodes left: the spread of their rewards must not be computed (numpy would warn).
    buffer = config.buffer.model_copy(update={"sampler": SamplerConfig(name="prioritized")})
    found = dropped(train_group("1"), config.model_copy(update={"buffer": buffer}))
    assert found.reason == "no_baseline"
    assert found.facts.dropped == {"no_baseline": {2: 2}}
    assert (found.facts.tokens, found.facts.kept) == (4, {})


@pytest.mark.parametrize("advantage", ["remax", "grpo"])
def test_group_with_baseline_is_stored_unchanged(tmp_path: Path, advantage: str) -> None:
    assert stored(with_baseline("1"), run(tmp_path, advantage=advantage)).blob == encode(with_baseline("1"))


@pytest.mark.parametrize(
    "chosen", [{"name": "pf_ppo", "strategy": "best_of_n", "keep": 3}, {"name": "length", "max_tokens": 2}], ids=str
)
def test_filter_keeps_baseline(tmp_path: Path, chosen: Mapping[str, object]) -> None:
    long = train_group("1", versions=(0, 1)).trajectories
    group = with_baseline("1")
    long = [msgspec.structs.replace(each, episode=2 + each.episode) for each in long]
    group = msgspec.structs.replace(group, trajectories=[*group.trajectories, *long])
    kept = decode_group(stored(group, run(tmp_path, chosen, advantage="remax")).blob)
    assert kept.greedy_reward == 0.25
    assert kept.trajectories != group.trajectories


def test_oldest_version_is_of_kept_episodes(tmp_path: Path) -> None:
    answers = [trajectory(versions=versions, episode=n) for n, versions in enumerate([(3,), (1, 4), (2,)])]
    group = msgspec.structs.replace(train_group("1"), trajectories=answers)
    assert stored(group, run(tmp_path)).oldest_version == 1
    assert stored(group, run(tmp_path, {"name": "length", "max_tokens": 2})).oldest_version == 2


@pytest.mark.parametrize(("curriculum", "outcome"), [(None, None), ({"after_groups": 3}, "mixed")])
def test_curriculum_judges_every_group(tmp_path: Path, curriculum: object, outcome: str | None) -> None:
    assert stored(train_group("1"), run(tmp_path, curriculum=curriculum)).facts.outcome == outcome
    too_long = run(tmp_path, {"name": "length", "max_tokens": 1}, curriculum=curriculum)
    assert dropped(train_group("1"), too_long).facts.outcome == outcome
    no_score = msgspec.structs.replace(trajectory(), scores={})
    found = dropped(msgspec.structs.replace(train_group("1"), trajectories=[no_score]), too_long)
    assert (found.reason, found.facts.outcome) == ("no_score", None)


def test_eval_group_has_estimates_of_its_answered_tasks(tmp_path: Path) -> None:
    """Two tasks of four answers each, the first answer in two trajectories; a third task failed."""
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    answers = [trajectory(reward=reward, episode=number) for number, reward in enumerate(rewards)]
    answers = [msgspec.structs.replace(each, scores={MAJORITY: float(each.episode >= 4)}) for each in answers]
    group = Group(
        id="e0-5", kind=EVAL, epoch=0, indices=[5, 6, 7], trajectories=[answers[0], *answers], missing=4,
        failures={"superseded": 1},
    )  # fmt: skip
    found = Inspector(run(tmp_path, eval_samples=4)).inspect("e0-5", encode(group)).result
    assert isinstance(found, EvalSliceResult)
    assert (found.work, found.failures) == (EvalSlice("e0-5", first=5, tasks=3), {"superseded": 1})
    # (sum, sum of squares) over the two tasks: means 0.25 and 0.75, best 1 and 1, majority 0 and 1
    assert found.tallies == {"score": (1.0, 0.625), "pass_at_k": (2.0, 2.0), "maj_at_k": (1.0, 1.0)}


def test_sampler_key_is_reproducible_per_group(tmp_path: Path) -> None:
    config = run(tmp_path)
    buffer = config.buffer.model_copy(update={"sampler": SamplerConfig(name="uniform")})
    config = config.model_copy(update={"buffer": buffer})
    places = [stored(train_group(group_id), config).order.key for group_id in ("1", "2", "1", "2")]
    assert places[:2] == places[2:]
    assert places[0] != places[1]


@pytest.mark.parametrize(
    ("filters", "digit_weight"), [([{"name": "dynamic_sampling", "score": "digit_match"}], 0.0), ([], 0.5)]
)
def test_group_without_needed_score_is_dropped(
    tmp_path: Path, filters: list[Mapping[str, object]], digit_weight: float
) -> None:
    """Its server has another configuration."""
    found = dropped(train_group("1"), run(tmp_path, *filters, digit_weight=digit_weight))
    assert found.reason == "no_score"
    assert found.facts.dropped == {"no_score": {2: 2}}


@pytest.mark.parametrize(
    "chosen",
    [
        {"name": "length", "max_tokens": 4},
        {"name": "dynamic_sampling"},
        {"name": "pf_ppo", "strategy": "best_worst", "keep": 4},
    ],
    ids=str,
)
def test_split_episodes_are_filtered_like_whole_ones(tmp_path: Path, chosen: Mapping[str, object]) -> None:
    """An episode of 2 · n action tokens, whole or as n trajectories of 2."""
    tokens, rewards = (1, 2, 3), (0.0, 0.5, 1.0)
    whole = [
        trajectory(versions=(0,) * n, reward=reward, episode=number)
        for number, (n, reward) in enumerate(zip(tokens, rewards, strict=True))
    ]
    parts = [
        trajectory(versions=(0,), reward=reward, episode=number)
        for number, (n, reward) in enumerate(zip(tokens, rewards, strict=True))
        for _ in range(n)
    ]
    config = run(tmp_path, chosen)
    group = train_group("1")
    kept = [stored(msgspec.structs.replace(group, trajectories=each), config) for each in (whole, parts)]
    assert kept[0].facts == kept[1].facts
    assert kept[0].order == kept[1].order
    episodes = [{(each.episode, each.reward) for each in decode_group(found.blob).trajectories} for found in kept]
    assert episodes[0] == episodes[1]


def test_repeated_draws_become_episodes_of_their_own(tmp_path: Path) -> None:
    first, last = train_group("1").trajectories
    group = msgspec.structs.replace(train_group("1"), trajectories=[first, first, last])
    chosen = {"name": "pf_ppo", "strategy": "best_of_n", "keep": 3}
    kept = decode_group(stored(group, run(tmp_path, chosen, advantage="reinforce_plus_plus")).blob)
    assert [each.episode for each in kept.trajectories] == [0, 0, 1, 1, 2, 2]
