"""Scoring groups with the terms of a run: deadlines, and evaluations beside training."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.run import RewardConfig, ScoringConfig
from slipstream.rewards.base import RewardFailed
from slipstream.rewards.compose import EpisodeReward
from slipstream.rewards.scorer import Scorer
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
        assert [result.reward for result in await hanging.score([episode("a")])] == [1.0]
        for evaluation in evaluations:
            evaluation.cancel()


@pytest.mark.parametrize("hanging", [0, 1], indirect=True, ids=["inline", "worker"])
async def test_a_group_past_its_deadline_is_not_scored(hanging: Scorer) -> None:
    with pytest.raises(RewardFailed, match=r"scoring\.workers") as failed:
        await hanging.score([episode("hang")], until=asyncio.get_running_loop().time())
    assert failed.value.reason == "scoring_timeout"
    async with asyncio.timeout(PATIENCE_S):
        assert len(await hanging.score([episode("5")])) == 1


@pytest.mark.parametrize("hanging", [1], indirect=True)
async def test_a_group_waits_while_time_is_left_for_its_scores(hanging: Scorer) -> None:
    loop = asyncio.get_running_loop()
    ahead = [asyncio.create_task(hanging.score([episode("hang")])) for _ in range(2)]
    await asyncio.sleep(0)
    until = loop.time() + 4.0
    with pytest.raises(RewardFailed, match="scoring_timeout"):
        await hanging.score([episode("fine")], until=until)
    assert loop.time() < until
    for task in ahead:
        task.cancel()
    await asyncio.wait(ahead)


def test_an_unknown_reward_is_refused_at_the_start() -> None:
    for workers in (0, 1):
        with pytest.raises(ConfigError, match="exact_mach"):
            Scorer([RewardConfig(name="exact_mach")], ScoringConfig(workers=workers))


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
    answers = [r"\boxed{x+7}", r"\boxed{x+8}", "no idea", r"\boxed{2^{2^{2^{2^{2^2}}}}}"]
    terms = [RewardConfig(name="math", options={"timeout_s": 0.5})]
    with closing(Scorer(terms, ScoringConfig(workers=1, deadline_s=PATIENCE_S))) as scorer:
        results = await scorer.score([episode(answer, reference="7+x") for answer in answers])
    columns = ("math", "math/parsed", "math/timeout")
    scores = [tuple(result.scores[column] for column in columns) for result in results]
    assert scores == [(1, 1, 0), (0, 1, 0), (0, 0, 0), (0, 1, 1)]
