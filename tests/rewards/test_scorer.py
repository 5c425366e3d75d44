"""Scoring groups with the terms of a run: deadlines, and evaluations beside training."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import structlog

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.run import RewardConfig, ScoringConfig
from slipstream.rewards.base import Failure, RewardUnavailable, Score
from slipstream.rewards.compose import EpisodeReward
from slipstream.rewards.scorer import FailureRate, Scorer
from tests.rewards.episodes import episode

PATIENCE_S = 60.0
HANGS = "reward_plugins:hangs_if_asked"


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture
def hanging(request: pytest.FixtureRequest) -> Iterator[Scorer]:
    """A reward that hangs if asked, for training and evaluation."""
    terms = [RewardConfig(name=HANGS)]
    with closing(Scorer(terms, ScoringConfig(workers=request.param), evaluated=terms)) as scorer:
        yield scorer


@pytest.mark.parametrize("hanging", [2], indirect=True)
async def test_evaluations_leave_workers_to_training(hanging: Scorer) -> None:
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        evaluations = [tasks.create_task(hanging.score([episode("hang")], evaluation=True)) for _ in range(8)]
        await asyncio.sleep(0)  # they start first
        assert reasons(await hanging.score([episode("a")])) == [""]
        for evaluation in evaluations:
            evaluation.cancel()


@pytest.mark.parametrize("hanging", [0, 1], indirect=True, ids=["inline", "worker"])
async def test_a_group_past_its_deadline_is_not_scored(hanging: Scorer) -> None:
    (failed,) = await hanging.score([episode("hang")], until=asyncio.get_running_loop().time())
    assert isinstance(failed, Failure)
    assert (failed.reason, "scoring.workers" in failed.detail) == ("scoring_timeout", True)
    async with asyncio.timeout(PATIENCE_S):
        assert len(await hanging.score([episode("5")])) == 1


@pytest.mark.parametrize("hanging", [1], indirect=True)
async def test_a_group_waits_while_time_is_left_for_its_scores(hanging: Scorer) -> None:
    loop = asyncio.get_running_loop()
    ahead = [asyncio.create_task(hanging.score([episode("hang")])) for _ in range(2)]
    await asyncio.sleep(0)
    until = loop.time() + 4.0
    assert reasons(await hanging.score([episode("fine")], until=until)) == ["scoring_timeout"]
    assert loop.time() < until
    for task in ahead:
        task.cancel()
    await asyncio.wait(ahead)


def reasons(results: Sequence[EpisodeReward | Failure]) -> list[str]:
    return [each.reason if isinstance(each, Failure) else "" for each in results]


class Flaky:
    """Fails for every answer the first `failures` times, for answers named `never` always."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.asked: Counter[str] = Counter()

    def __call__(self, answer: str, reference: str, info: Mapping[str, Any]) -> float:
        self.asked[answer] += 1
        if answer == "never" or self.asked[answer] <= self.failures:
            raise RewardUnavailable("no judge")
        return 1.0


async def test_failed_calls_are_repeated_twice() -> None:
    terms = [RewardConfig(name="flaky", function=f"{__name__}:Flaky", options={"failures": 2})]
    with closing(Scorer(terms, ScoringConfig(workers=0), backoff_s=0.01)) as scorer:
        results = await scorer.score([episode("a"), episode("never"), episode("b")])
        assert reasons(results) == ["", "reward_unavailable", ""]
        flaky = scorer.runner.rewards["flaky"].function
        assert isinstance(flaky, Flaky)
        assert flaky.asked == {"a": 3, "never": 3, "b": 3}


async def test_worker_that_ends_costs_its_episode_after_all_tries() -> None:
    terms = [RewardConfig(name="reward_plugins:dies_if_asked")]
    with closing(Scorer(terms, ScoringConfig(workers=1), backoff_s=0.01)) as scorer:
        async with asyncio.timeout(PATIENCE_S):
            assert reasons(await scorer.score([episode("a"), episode("die"), episode("b")])) == ["", "reward_crash", ""]


def test_reward_that_fails_often_is_named() -> None:
    rate = FailureRate("judge")
    with structlog.testing.capture_logs() as logs:
        rate.record([Score(1.0)] * 78)
        rate.record([Failure("reward_error", "why")] * 21)
        assert not logs
        for _ in range(3):
            rate.record([Failure("reward_error", "why")])
    (warning,) = logs
    assert (warning["reward"], warning["reason"], warning["failed"]) == ("judge", "reward_error", 22)


def test_calls_must_end_within_a_ticket() -> None:
    with closing(Scorer([RewardConfig(name="reward_plugins:judged")], ScoringConfig(workers=0))) as scorer:
        scorer.require_time(generation_s=300, ticket_s=600)
        with pytest.raises(
            ConfigError, match=r"judged 30.*buffer\.ticket_deadline_s=330.*rollout\.group_deadline_s=300"
        ):
            scorer.require_time(generation_s=300, ticket_s=330)


async def test_a_run_scores_its_terms_and_its_evaluation() -> None:
    config = RunConfig.model_validate(
        {
            "model": {"build": "digits"},
            "rewards": [{"name": "digit_match", "weight": 2}, {"name": "reward_plugins:judged", "weight": 0}],
            "eval": {"reward": "exact_match"},
            "scoring": {"workers": 0},
        }
    )
    scorer = Scorer(config.rewards, config.scoring, evaluated=config.evaluated)
    subject = [episode("12", reference="13")]
    scores = {"digit_match": 0.5, "reward_plugins:judged": 1.0, "reward_plugins:judged/tokens": 2.0}
    assert await scorer.score(subject) == [EpisodeReward(1.0, scores, [])]
    assert await scorer.score(subject, evaluation=True) == [EpisodeReward(0.0, {"exact_match": 0.0}, [])]
    scorer.close()


async def test_wrong_unparsed_and_late_answers_differ_in_the_scores() -> None:
    pytest.importorskip("math_verify")
    late = [rf"\boxed{{{base}^{{2^{{2^{{2^{{2^2}}}}}}}}}}" for base in range(2, 6)]
    answers = [r"\boxed{x+7}", r"\boxed{x+8}", "no idea", *late]
    terms = [RewardConfig(name="math", options={"timeout_s": 0.5})]
    with closing(Scorer(terms, ScoringConfig(workers=1))) as scorer:
        results = await scorer.score([episode(answer, reference="7+x") for answer in answers])
    assert math_scores(results) == [(1, 1, 0), (0, 1, 0), (0, 0, 0), *[(0, 1, 1)] * 4]


def math_scores(results: Sequence[EpisodeReward | Failure]) -> list[tuple[float, ...]]:
    columns = ("math", "math/parsed", "math/timeout")
    return [tuple(each.scores[column] for column in columns) for each in results if isinstance(each, EpisodeReward)]


async def test_program_that_sleeps_scores_0_and_delays_no_other_group() -> None:
    """A program's clock starts when it starts: twelve groups at once on two cores are all scored."""
    program = "def double(x):\n    return 2 * x\n"
    terms = [RewardConfig(name="code", options={"limits": {"wall_s": 5}})]
    sleeps, tests = f"import time\ntime.sleep(60)\n{program}", "assert double(2) == 4"
    with closing(Scorer(terms, ScoringConfig(workers=1))) as scorer:
        groups = [[episode(answer, reference=tests) for answer in (program, sleeps)]]
        groups += [[episode(program, reference=tests)] * 2 for _ in range(11)]
        results = await asyncio.gather(*map(scorer.score, groups))
    rewards = [each.scores if isinstance(each, EpisodeReward) else each for group in results for each in group]
    parts = {"code/parsed": 1.0, "code/refused": 0.0, "code/forged": 0.0}
    passed = {**parts, "code": 1.0, "code/passed": 1.0, "code/timeout": 0.0}
    late = {**parts, "code": 0.0, "code/passed": 0.0, "code/timeout": 1.0}
    assert rewards == [passed, late, *[passed] * 22]
