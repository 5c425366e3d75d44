"""Filters: which episodes of a group are kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.policies.filters import EpisodeFacts, Outcome, Verdict, apply_filters, group_outcome
from slipstream.configs.schema.buffer import DynamicSamplingConfig, Filter, FiltrationConfig, LengthFilterConfig

DYNAMIC = DynamicSamplingConfig(name="dynamic_sampling")
SHORT = LengthFilterConfig(name="length", max_tokens=10)
BEST_WORST = FiltrationConfig(name="pf_ppo", strategy="best_worst", keep=8)
BEST = FiltrationConfig(name="pf_ppo", strategy="best_of_n", keep=3)

answer_lists = st.lists(
    st.builds(
        EpisodeFacts,
        tokens=st.integers(0, 20),
        reward=st.sampled_from([0.0, 0.5, 1.0]),
        scores=st.just({}),
        truncated=st.booleans(),
    ),
    min_size=1,
    max_size=8,
)
filter_lists: st.SearchStrategy[list[Filter]] = st.lists(
    st.sampled_from([DYNAMIC, SHORT, BEST, BEST_WORST, LengthFilterConfig(name="length", drop_truncated=True)]),
    max_size=4,
)


def answers(
    *rewards: float, tokens: tuple[int, ...] = (), truncated: tuple[int, ...] = (), right: tuple[int, ...] = ()
) -> list[EpisodeFacts]:
    return [
        EpisodeFacts(
            tokens=tokens[index] if tokens else 5,
            reward=reward,
            scores={"exact_match": float(index in right)},
            truncated=index in truncated,
        )
        for index, reward in enumerate(rewards)
    ]


def verdict(group: list[EpisodeFacts], *filters: Filter, seed: int = 0) -> Verdict:
    return apply_filters(group, filters, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("rewards", "filters", "outcome"), [((0, 0), [], None), ((0, 1), [DYNAMIC], "mixed")], ids=["no filters", "mixed"]
)
def test_episodes_are_kept(rewards: tuple[float, ...], filters: list[Filter], outcome: Outcome | None) -> None:
    assert verdict(answers(*rewards), *filters) == Verdict(keep=(0, 1), dropped=(), outcome=outcome)


@given(group=answer_lists, filters=filter_lists, seed=st.integers(0, 100))
def test_episodes_are_kept_or_dropped_once(group: list[EpisodeFacts], filters: list[Filter], seed: int) -> None:
    result = verdict(group, *filters, seed=seed)
    dropped = [index for index, _ in result.dropped]
    assert sorted({*result.keep, *dropped}) == list(range(len(group)))
    assert not {*result.keep} & {*dropped}
    assert len(dropped) == len({*dropped})
    assert {reason for _, reason in result.dropped} <= {config.name for config in filters}
    assert list(result.keep) == sorted(result.keep)
    assert (result.reason is None) == bool(result.keep)


@pytest.mark.parametrize(
    ("rewards", "outcome"), [((1, 1, 1), "solved"), ((0, 0, 0), "unsolved"), ((0.5, 0.5), "unsolved")]
)
def test_equal_rewards_are_dropped_with_outcome(rewards: tuple[float, ...], outcome: str) -> None:
    result = verdict(answers(*rewards), DYNAMIC)
    assert result.keep == ()
    assert (result.reason, result.outcome) == ("dynamic_sampling", outcome)
    assert result.dropped == tuple((index, "dynamic_sampling") for index in range(len(rewards)))


def test_minimum_spread_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.buffer.policies.filters.MIN_SPREAD", 0.5)
    assert verdict(answers(0.25, 0.75), DYNAMIC).reason == "dynamic_sampling"
    assert verdict(answers(0.25, 0.76), DYNAMIC).reason is None


@pytest.mark.parametrize(
    ("rewards", "right", "outcome"),
    [((0.5, 1.0), (0, 1), "solved"), ((-1.0, 0.0), (), "unsolved"), ((0.5, 0.5), (1,), "mixed")],
)
def test_dynamic_sampling_uses_configured_score(
    rewards: tuple[float, ...], right: tuple[int, ...], outcome: str
) -> None:
    accuracy = DynamicSamplingConfig(name="dynamic_sampling", score="exact_match")
    result = verdict(answers(*rewards, right=right), accuracy)
    assert (result.outcome, bool(result.keep)) == (outcome, outcome == "mixed")


@pytest.mark.parametrize(
    ("rewards", "right", "filters", "outcome"),
    [
        ((1, 1), (), [], "solved"),
        ((0, 0), (), [], "unsolved"),
        ((0, 1), (), [], "mixed"),
        ((0, 1, 0), (), [BEST, DYNAMIC], "mixed"),
        ((0.5, 1.0), (0, 1), [SHORT, DynamicSamplingConfig(name="dynamic_sampling", score="exact_match")], "solved"),
    ],
    ids=["solved", "unsolved", "mixed", "over all episodes", "by score"],
)
def test_group_outcome_is_over_all_episodes(
    rewards: tuple[float, ...], right: tuple[int, ...], filters: list[Filter], outcome: str
) -> None:
    assert group_outcome(answers(*rewards, right=right), filters) == outcome


def test_length_bounds_are_inclusive() -> None:
    between = LengthFilterConfig(name="length", min_tokens=3, max_tokens=6)
    result = verdict(answers(0, 0, 0, 0, tokens=(2, 3, 6, 7)), between)
    assert result == Verdict(keep=(1, 2), dropped=((0, "length"), (3, "length")), outcome=None)


def test_drop_truncated_is_optional() -> None:
    group = answers(0, 1, 1, truncated=(1,))
    assert verdict(group, LengthFilterConfig(name="length", drop_truncated=True)).dropped == ((1, "length"),)
    assert verdict(group, LengthFilterConfig(name="length")).dropped == ()


def test_length_filter_keeps_no_single_remaining_episode() -> None:
    result = verdict(answers(0, 1, tokens=(5, 50)), SHORT)
    assert result == Verdict(keep=(), dropped=((0, "length"), (1, "length")), outcome=None)
    assert result.reason == "length"
    assert verdict(answers(1, tokens=(5,)), SHORT).keep == (0,), "a group of one"
    assert verdict(answers(1, tokens=(50,)), SHORT).reason == "length"


def test_filters_apply_in_order() -> None:
    group = answers(0, 0, 1, tokens=(5, 5, 50))
    length_first = verdict(group, SHORT, DYNAMIC)
    assert length_first.outcome == "unsolved"
    assert length_first.reason == "dynamic_sampling"
    assert length_first.dropped == ((2, "length"), (0, "dynamic_sampling"), (1, "dynamic_sampling"))
    dynamic_first = verdict(group, DYNAMIC, SHORT)
    assert dynamic_first == Verdict(keep=(0, 1), dropped=((2, "length"),), outcome="mixed")


def test_dynamic_sampling_after_pf_ppo() -> None:
    result = verdict(answers(0, 1, 0), BEST, DYNAMIC)
    assert (result.keep, result.reason, result.outcome) == ((), "dynamic_sampling", "solved")
    assert verdict(answers(0, 1, 0), BEST_WORST, DYNAMIC).outcome == "mixed"


def test_pf_ppo_ranks_remaining_episodes() -> None:
    result = verdict(answers(0, 1, 0), BEST)
    assert result == Verdict(keep=(1, 1, 1), dropped=((0, "pf_ppo"), (2, "pf_ppo")), outcome=None)
    result = verdict(answers(0.2, 0.9, 0.4, 0.3, tokens=(5, 50, 5, 5)), SHORT, BEST)
    assert result.keep == (2, 2, 2)
    assert result.dropped == ((1, "length"), (0, "pf_ppo"), (3, "pf_ppo"))


def test_group_without_episodes_is_refused() -> None:
    with pytest.raises(ValueError, match="episodes"):
        verdict([], DYNAMIC)
