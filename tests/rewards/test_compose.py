"""Calling rewards, checking their results, and the weighted sum."""

import asyncio
import math
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, RewardFailed, Score
from slipstream.rewards.compose import Reward, score_async, score_plain, weighted
from tests.rewards.episodes import episode

EPISODES = [episode("5"), episode("71")]


def plain(result: Any) -> Reward:
    return Reward("mine", lambda answer, reference, info: result, "answer", is_async=False)


def test_each_kind_of_plain_function_scores_each_episode() -> None:
    rewards = [
        Reward("answer", lambda answer, reference, info: answer == reference, "answer", is_async=False),
        Reward("episode", lambda episode: Score(episode.tokens, {"half": 0.5}), "episode", is_async=False),
        Reward("group", lambda episodes: range(len(episodes)), "group", is_async=False),
    ]
    assert score_plain(rewards, EPISODES) == {
        "answer": [Score(1.0), Score(0.0)],
        "episode": [Score(1.0, {"half": 0.5}), Score(2.0, {"half": 0.5})],
        "group": [Score(0.0), Score(1.0)],
    }


async def test_async_rewards_score_all_episodes_at_once() -> None:
    together = asyncio.Barrier(2 * len(EPISODES) + 1)

    async def judged(episode: Episode) -> float:
        await together.wait()
        return episode.tokens

    async def matched(answer: str, reference: str, info: object) -> float:
        await together.wait()
        return float(answer == reference)

    async def ranked(episodes: Sequence[Episode]) -> list[float]:
        await together.wait()
        return [0.0] * len(episodes)

    rewards = [
        Reward("episode", judged, "episode", is_async=True),
        Reward("answer", matched, "answer", is_async=True),
        Reward("group", ranked, "group", is_async=True),
        plain(1.0),
    ]
    async with asyncio.timeout(30):
        scores = await score_async(rewards, EPISODES)
    values = {name: [score.value for score in column] for name, column in scores.items()}
    assert values == {"episode": [1.0, 2.0], "answer": [1.0, 0.0], "group": [0.0, 0.0]}


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError("its own")], ids=repr
)
@pytest.mark.parametrize("takes", ["episode", "group"])
async def test_async_error_fails_the_group_and_cancels_the_others(error: BaseException, takes: Any) -> None:
    cancelled = asyncio.Event()

    async def raises(*_: object) -> float:
        await asyncio.sleep(0)
        raise error

    async def waits(*_: object) -> float:
        try:
            return await asyncio.Future()
        finally:
            cancelled.set()

    rewards = [Reward("bad", raises, takes, is_async=True), Reward("good", waits, takes, is_async=True)]
    with pytest.raises(RewardFailed, match=f"bad: {type(error).__name__}") as failed:
        await score_async(rewards, EPISODES)
    assert failed.value.reason == "reward_error"
    assert cancelled.is_set()


@pytest.mark.parametrize("takes", ["episode", "group"])
async def test_cancelling_an_async_score_is_no_reward_error(takes: Any) -> None:
    started = asyncio.Event()

    async def waits(*_: object) -> float:
        started.set()
        return await asyncio.Future()

    scoring = asyncio.create_task(score_async([Reward("slow", waits, takes, is_async=True)], EPISODES))
    await started.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


def in_spans(*spans: tuple[int, float]) -> Score:
    return Score(1.0, spans=spans)


@pytest.mark.parametrize("exact", [1e6, Score(-1e6), in_spans((3, 0.75), (4, 0.25)), Score(True)], ids=repr)
def test_a_usable_result_is_kept(exact: Any) -> None:
    (score,) = score_plain([plain(exact)], EPISODES[:1])["mine"]
    assert score == (exact if isinstance(exact, Score) else Score(exact))


@pytest.mark.parametrize(
    "result",
    [
        *(1e300, -sys.float_info.max, 10**400, 1e39, math.nan, "1.0", None),
        Score(math.inf),
        Score(1.0, {"part": math.nan}),
        in_spans((3, 0.5)),
        in_spans((4, 0.5), (3, 0.5)),
        in_spans((5, 1.0)),
        in_spans((0, 1.0)),
    ],
    ids=lambda result: repr(result)[:40],
)
def test_an_unusable_result_is_a_reward_error(result: Any) -> None:
    with pytest.raises(RewardFailed, match="mine: ") as failed:
        score_plain([plain(result)], EPISODES[:1])
    assert failed.value.reason == "reward_error"


@pytest.mark.parametrize("results", [[1.0], 2.0, None, [1.0, "x"]], ids=repr)
def test_a_group_reward_returns_one_result_per_episode(results: Any) -> None:
    rewards = [Reward("mine", lambda episodes: results, "group", is_async=False)]
    with pytest.raises(RewardFailed, match="mine: TypeError"):
        score_plain(rewards, EPISODES)


def test_terms_are_summed_by_weight_and_parts_are_recorded() -> None:
    terms = [RewardConfig(name="a", weight=0.5), RewardConfig(name="b", weight=-2), RewardConfig(name="c", weight=0)]
    scores = {"a": Score(1.0, spans=((4, 1.0),)), "b": Score(0.25, {"style": 3.0}), "c": Score(9.0)}
    result = weighted(scores | {"other": Score(7.0)}, terms)
    assert result.reward == 0.0
    assert result.scores == {"a": 1.0, "b": 0.25, "b/style": 3.0, "c": 9.0, "other": 7.0}
    assert result.spans == [(4, 0.5)]


def test_a_term_without_a_score_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="b"):
        weighted({"a": Score(1.0)}, [RewardConfig(name="b")])


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_a_weight_is_finite(weight: float) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        RewardConfig(name="a", weight=weight)
