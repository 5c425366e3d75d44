"""Calling rewards, checking their results, and the weighted sum."""

import asyncio
import math
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Episode, Failure, Result, RewardUnavailable, Score
from slipstream.rewards.compose import Reward, run_all, weighted
from tests.rewards.episodes import episode

EPISODES = [episode("5"), episode("71")]


def plain(result: Any) -> Reward:
    return Reward("mine", lambda answer, reference, info: result, "answer", is_async=False)


def run(reward: Reward) -> list[Result]:
    """All calls of a plain reward for the episodes."""
    calls = reward.calls(len(EPISODES))
    return [each for call in calls for each in reward.run([EPISODES[index] for index in call.indices])]


async def run_async(reward: Reward) -> list[Result]:
    """All calls of an async reward for the episodes, at once."""
    calls = reward.calls(len(EPISODES))
    found = await run_all([reward.run_async([EPISODES[index] for index in call.indices]) for call in calls])
    return [each for results in found for each in results]


def outcome(result: Result) -> float | str:
    return result.reason if isinstance(result, Failure) else result.value


@pytest.mark.parametrize(
    ("takes", "function", "scores"),
    [
        ("answer", lambda answer, reference, info: answer == reference, [Score(1.0), Score(0.0)]),
        (
            "episode",
            lambda episode: Score(episode.tokens, {"a": 0.5}),
            [Score(1.0, {"a": 0.5}), Score(2.0, {"a": 0.5})],
        ),
        ("group", lambda episodes: range(len(episodes)), [Score(0.0), Score(1.0)]),
    ],
)
def test_each_kind_of_plain_function_scores_each_episode(takes: Any, function: Any, scores: list[Score]) -> None:
    assert run(Reward("mine", function, takes, is_async=False)) == scores


async def test_async_calls_run_at_once() -> None:
    together = asyncio.Barrier(len(EPISODES))

    async def judged(episode: Episode) -> float:
        await together.wait()
        return episode.tokens

    async with asyncio.timeout(30):
        assert await run_async(Reward("mine", judged, "episode", is_async=True)) == [Score(1.0), Score(2.0)]


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), TimeoutError("its own"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError("its own")],
    ids=repr,
)
async def test_error_costs_its_episode(error: BaseException) -> None:
    def raises(answer: str, reference: str, info: object) -> float:
        if answer == "71":
            raise error
        return 1.0

    async def later(answer: str, reference: str, info: object) -> float:
        await asyncio.sleep(0)
        return raises(answer, reference, info)

    for reward in (Reward("bad", raises, "answer", is_async=False), Reward("bad", later, "answer", is_async=True)):
        good, bad = await run_async(reward) if reward.is_async else run(reward)
        assert good == Score(1.0)
        assert isinstance(bad, Failure)
        assert (bad.reason, bad.detail.startswith(f"bad: {type(error).__name__}")) == ("reward_error", True)


@pytest.mark.parametrize(
    ("returned", "outcomes"),
    [
        ([1.0, RewardUnavailable("no judge")], [1.0, "reward_unavailable"]),
        ([math.nan, 1.0], ["reward_error", 1.0]),
        ([1.0], ["reward_error"] * 2),
        (None, ["reward_error"] * 2),
    ],
)
def test_group_reward_may_fail_for_single_episodes(returned: Any, outcomes: list[Any]) -> None:
    assert list(map(outcome, run(Reward("mine", lambda _: returned, "group", is_async=False)))) == outcomes


@pytest.mark.parametrize("takes", ["episode", "group"])
async def test_cancelling_an_async_score_is_no_reward_error(takes: Any) -> None:
    started = asyncio.Event()

    async def waits(*_: object) -> float:
        started.set()
        return await asyncio.Future()

    scoring = asyncio.create_task(run_async(Reward("slow", waits, takes, is_async=True)))
    await started.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


async def hangs(answer: str, reference: str, info: object) -> float:
    return await asyncio.Future()


class Limited:
    worst_case_s = 7.0

    async def __call__(self, answer: str, reference: str, info: object) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("function", "takes", "is_async", "deadline_s", "limit_s"),
    [
        (Limited(), "answer", True, 1.0, math.inf),  # it may wait for its turn
        (Limited(), "answer", False, 1.0, 7.0),
        (hangs, "answer", True, 30.0, 30.0),
        (len, "group", False, 30.0, 120.0),
    ],
)
def test_own_limit_is_used_instead_of_the_deadline(
    function: Any, takes: Any, is_async: bool, deadline_s: float, limit_s: float
) -> None:
    assert Reward("mine", function, takes, is_async, deadline_s).limit_s(4) == limit_s


async def test_async_call_ends_at_its_limit() -> None:
    reward = Reward("slow", hangs, "answer", is_async=True, deadline_s=0.01)
    assert list(map(outcome, await run_async(reward))) == ["reward_timeout"] * 2


def in_spans(*spans: tuple[int, float]) -> Score:
    return Score(1.0, spans=spans)


@pytest.mark.parametrize("exact", [1e8, Score(-1e8), in_spans((3, 0.75), (4, 0.25)), Score(True)], ids=repr)
def test_a_usable_result_is_kept(exact: Any) -> None:
    (score,) = plain(exact).run(EPISODES[:1])
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
    (failed,) = plain(result).run(EPISODES[:1])
    assert isinstance(failed, Failure)
    assert (failed.reason, failed.detail.startswith("mine: ")) == ("reward_error", True)


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
