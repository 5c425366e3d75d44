"""Rewards chosen by the source of a task."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import RewardConfig, ScoringConfig
from slipstream.rewards.base import Episode, Failure, RewardUnavailable, Score, group_reward
from slipstream.rewards.compose import EpisodeReward
from slipstream.rewards.functions import by_source
from slipstream.rewards.registry import REWARDS as BUILT_IN
from slipstream.rewards.registry import find_reward
from slipstream.rewards.scorer import Scorer
from tests.rewards.episodes import episode

HERE = "tests.rewards.functions.test_by_source"


async def lengths(given: Episode) -> Score:
    return Score(float(len(given.answer)), {"seen": 1.0}, [(given.turns[-1].end, float(len(given.answer)))])


def runs_a_loop(given: Episode) -> float:
    return asyncio.run(asyncio.sleep(0, 3.0))


@group_reward
def ranks(episodes: Sequence[Episode]) -> list[float]:
    return [float(number) for number, _ in enumerate(episodes)]


@group_reward
async def ranks_later(episodes: Sequence[Episode]) -> list[float]:
    return ranks(episodes)


class Counted:
    """Scores how many calls have been open at a time."""

    def __init__(self) -> None:
        self.open = self.most = 0

    async def __call__(self, answer: str, reference: str, info: Mapping[str, Any]) -> float:
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(0)
        self.open -= 1
        return float(self.most)


RELEASED = threading.Event()


def hangs(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    if answer == "hang":
        RELEASED.wait(60)
    return 1.0


def lacks(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    raise RewardUnavailable("no judge")


class Closable:
    closed: ClassVar[int] = 0

    def __call__(self, answer: str, reference: str, info: Mapping[str, Any]) -> float:
        return 1.0

    def close(self) -> None:
        Closable.closed += 1


REWARDS = {
    "match": "exact_match",
    "share*": {"name": "other", "function": "digit_match"},
    "lengths": f"{HERE}:lengths",
    "loop": f"{HERE}:runs_a_loop",
    "ranks": f"{HERE}:ranks",
    "later": f"{HERE}:ranks_later",
}


async def scored(source: Any, *, key: str = "data_source", workers: int = 0, **options: Any) -> list[EpisodeReward]:
    term = RewardConfig(name="by_source", weight=2, options={"rewards": REWARDS, "key": key} | options)
    scorer = Scorer([term], ScoringConfig(workers=workers), backoff_s=None)
    with closing(scorer):
        found = await scorer.score([episode(answer, "12", {key: source}) for answer in ("12", "13")])
    assert not any(isinstance(each, Failure) for each in found)
    return [each for each in found if isinstance(each, EpisodeReward)]


async def failed(source: Any, **options: Any) -> list[Failure | EpisodeReward]:
    """The results of three answers, the second of which is `hang`."""
    term = RewardConfig(name="by_source", options=options)
    with closing(Scorer([term], ScoringConfig(workers=0, deadline_s=2.0), backoff_s=None)) as scorer:
        return await scorer.score([episode(answer, "12", {"data_source": source}) for answer in ("12", "hang", "12")])


@pytest.mark.parametrize(
    ("source", "label", "scores"),
    [
        ("match", "match", [1.0, 0.0]), ("share/of", "share*", [1.0, 0.5]), ("loop", "loop", [3.0, 3.0]),
        ("ranks", "ranks", [0.0, 1.0]), ("later", "later", [0.0, 1.0]),
    ],
)  # fmt: skip
async def test_reward_of_the_source_scores(source: str, label: str, scores: list[float]) -> None:
    found = await scored(source)
    assert [each.reward for each in found] == [2 * score for score in scores]
    assert [each.scores for each in found] == [{"by_source": score, f"by_source/{label}": score} for score in scores]


def outcomes(found: Sequence[Failure | EpisodeReward]) -> list[str | float]:
    return [each.reason if isinstance(each, Failure) else each.reward for each in found]


async def test_hanging_reward_costs_its_episode() -> None:
    rewards = {"hangs": f"{HERE}:hangs"}
    try:
        assert outcomes(await failed("hangs", rewards=rewards)) == [1.0, "reward_timeout", 1.0]
    finally:
        RELEASED.set()


@pytest.mark.parametrize(("keys", "most"), [({}, 2.0), ({"concurrency": 1}, 1.0)])
async def test_open_calls_of_a_sources_reward_are_limited(keys: dict[str, Any], most: float) -> None:
    found = await scored("counted", rewards={"counted": {"name": f"{HERE}:Counted", **keys}})
    assert max(each.scores["by_source"] for each in found) == most


async def test_unavailable_reward_keeps_its_reason() -> None:
    assert outcomes(await failed("lacks", rewards={"lacks": f"{HERE}:lacks"})) == ["reward_unavailable"] * 3


async def test_rewards_are_closed() -> None:
    await scored("closable", rewards={"closable": f"{HERE}:Closable"}, default=f"{HERE}:Closable")
    assert Closable.closed == 2


async def test_parts_and_spans_are_kept() -> None:
    first, _ = await scored("lengths")
    assert first.scores == {"by_source": 2.0, "by_source/lengths": 2.0, "by_source/seen": 1.0}
    assert first.spans == [(5, 4.0)]


async def test_reward_is_built_in_workers() -> None:
    assert [each.reward for each in await scored("a", workers=1, rewards={"a": "exact_match"})] == [2.0, 0.0]


async def test_source_may_be_the_env_of_a_mixture() -> None:
    assert [each.reward for each in await scored("match", key="env")] == [2.0, 0.0]


async def test_known_sources_have_rewards_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(by_source.KNOWN_SOURCES, "openai/gsm8k", "exact_match")
    assert [each.scores["by_source/openai/gsm8k"] for each in await scored("openai/gsm8k")] == [1.0, 0.0]
    named = await scored("openai/gsm8k", rewards={"openai/*": "digit_match"})
    assert [each.scores["by_source/openai/*"] for each in named] == [1.0, 0.5]


async def test_known_source_of_math_is_scored_by_math() -> None:
    scorer = Scorer([RewardConfig(name="by_source")], ScoringConfig(workers=0))
    answers, info = (r"so \boxed{1{,}200}", "I think 7"), {"data_source": "openai/gsm8k"}
    found = await scorer.score([episode(answer, "20 * 60 = 1200\n#### 1,200", info) for answer in answers])
    assert outcomes(found) == [1.0, 0.0]
    assert [each.scores["by_source/parsed"] for each in found if isinstance(each, EpisodeReward)] == [1.0, 1.0]


def test_rewards_of_known_sources_are_built_in() -> None:
    assert set(by_source.KNOWN_SOURCES.values()) <= BUILT_IN.built_in.keys()


@pytest.mark.parametrize("source", ["unknown", None, 3])
async def test_unknown_source_fails_unless_there_is_a_default(source: Any) -> None:
    assert outcomes(await failed(source)) == ["reward_error"] * 3
    assert [each.scores["by_source/default"] for each in await scored(source, default="digit_match")] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"rewards": {"a": "exact_mtch"}}, "exact_match"),
        ({"default": "exact_mtch"}, "exact_match"),
        ({"reward": {}}, "reward"),
        ({"rewards": {"a": {"nme": "x"}}}, "nme"),
        ({"rewards": {"a": {"name": "exact_match", "retries": 1}}}, "retries"),
    ],
)
def test_unusable_options_are_refused(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        find_reward(RewardConfig(name="by_source", options=options))
