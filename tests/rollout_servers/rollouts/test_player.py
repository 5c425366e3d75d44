"""Playing and scoring the episodes of a task."""

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from slipstream.buffer.wire import codec
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.env.base import Env, Split, Task
from slipstream.env.builtin.mix import Mix, Part
from slipstream.models.digits import EOS, TOKENS
from slipstream.models.tokenizer import Tokenizer
from slipstream.rewards.base import Episode, Score
from slipstream.rewards.scorer import Scorer
from slipstream.rollout_servers.engines.base import Completion, Engine, EngineError, Request, RequestRefused
from slipstream.rollout_servers.rollouts import base
from slipstream.rollout_servers.rollouts.base import EpisodeFailed
from slipstream.rollout_servers.rollouts.player import Player
from slipstream.rollout_servers.tally import Tally
from tests.rollout_servers.scripted import ScriptedEngine, completion, ids, lasting

CUT = completion(ids("2"), finish_reason="abort")
DONE = completion(ids("21"))
HALF = completion(ids("24"))


class Mute(Exception):
    def __repr__(self) -> str:
        raise ValueError

    __str__ = __repr__


@dataclass
class Prompts:
    """An env whose tasks are these prompts, answered with 21; it raises exceptions and returns other objects."""

    prompts: tuple[Any, ...]
    info: Mapping[str, Any] = field(default_factory=dict)

    def size(self, split: Split) -> int:
        return len(self.prompts)

    def task(self, split: Split, index: int) -> Task:
        prompt = self.prompts[index]
        if isinstance(prompt, BaseException):
            raise prompt
        return Task(prompt=prompt, reference="21", info=self.info) if isinstance(prompt, str) else prompt

    def fingerprint(self) -> str:
        return repr(self.prompts)


@dataclass
class Blocking(Prompts):
    """Returns no task before it is released; records the indices it was called with, and the threads."""

    released: threading.Event = field(default_factory=threading.Event)
    called: list[int] = field(default_factory=list)
    threads: set[threading.Thread] = field(default_factory=set)

    def task(self, split: Split, index: int) -> Task:
        self.called.append(index)
        self.threads.add(threading.current_thread())
        assert self.released.wait(30), "never released"
        return super().task(split, index)


class MakePlayer:
    """Players with the digits tokenizer, and an env of prompts unless there is another."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = Tokenizer(model)

    def config(
        self, rewards: tuple[dict[str, Any], ...] = (), evaluated: str | None = None, **rollout: Any
    ) -> RunConfig:
        return RunConfig.model_validate(
            {
                "model": {"build": "digits"},
                "env": {"name": "rows"},
                "rewards": rewards or ({"name": "digit_match", "weight": 2}, {"name": "exact_match", "weight": 0}),
                "eval": {"reward": evaluated},
                "scoring": {"workers": 0},
                "rollout": {"engine": {"max_model_len": 10}, "sampling": {"max_tokens": 4}} | rollout,
            }
        )

    def __call__(
        self,
        engine: Engine | Completion,
        *more: Completion,
        prompts: tuple[Any, ...] = ("12r",),
        env: Env | None = None,
        ticket_deadline_s: float = 600.0,
        **config: Any,
    ) -> Player:
        """`engine`, or one that gives these answers."""
        made = self.config(**config)
        return Player(
            env or Prompts(prompts),
            self.tokenizer,
            lasting(ScriptedEngine([engine, *more]), made.rollout) if isinstance(engine, Completion) else engine,
            Scorer(made.rewards, made.scoring, evaluated=made.evaluated, backoff_s=None),
            made.rollout,
            env_name="rows",
            ticket_deadline_s=ticket_deadline_s,
        )


@pytest.fixture
def player(model: Path) -> MakePlayer:
    return MakePlayer(model)


async def failure(
    playing: Player, index: int = 0, split: Split = "train", samples: int = 2, tally: Tally | None = None
) -> EpisodeFailed:
    with pytest.raises(EpisodeFailed) as failed:
        await playing.score(await playing.generate(split, index, samples=samples, tally=tally))
    assert failed.value.detail.startswith(f"task (rows, {split}, {index}): ")
    return failed.value


async def test_each_sample_is_a_trajectory_of_prompt_and_answer(player: MakePlayer) -> None:
    answers = [completion([*ids("21"), TOKENS.index(EOS)]), completion(ids("24"), finish_reason="length")]
    engine = ScriptedEngine(answers)
    first, second = await player(engine).play("train", 0, samples=2)

    assert engine.asked == [(ids("12r"), 2, False)]
    assert codec.token_ids(first).tolist() == [*ids("12r"), *ids("21"), TOKENS.index(EOS)]
    assert codec.action_mask(first).tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(codec.behaviour_logprobs(first), [0, 0, 0, -1, -2, -3])
    assert first.spans == [m.VersionSpan(version=0, start=3, end=6)]
    assert (first.reward, first.scores) == (2.0, {"digit_match": 1.0, "exact_match": 1.0})
    assert (second.reward, second.scores) == (1.0, {"digit_match": 0.5, "exact_match": 0.0})
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert (first.episode, second.episode, first.rewards) == (0, 1, [])


async def test_spans_of_a_score_are_weighted_and_sum_to_the_reward(player: MakePlayer) -> None:
    rewards = ({"name": f"{__name__}:first_token_first", "weight": 2}, {"name": "digit_match"})
    (trajectory,) = await player(HALF, rewards=rewards).play("train", 0, samples=1)
    assert trajectory.reward == 2.5
    assert trajectory.rewards == [m.RewardSpan(end=4, value=1.5), m.RewardSpan(end=5, value=1.0)]


async def test_reward_is_recorded_by_the_env_of_a_mixture(player: MakePlayer) -> None:
    mixed = Mix([Part(label, Prompts(("12r",)), 1.0) for label in ("one", "other")])
    playing = player(HALF, HALF, env=mixed)
    scores = [(await playing.play("train", index, samples=1))[0].scores for index in range(2)]
    assert [{name for name in each if name.startswith("mix/")} for each in scores] == [{"mix/one"}, {"mix/other"}]
    assert scores[0]["mix/one"] == 1.0


def first_token_first(episode: Episode) -> Score:
    end = episode.turns[-1].end
    return Score(1.0, spans=[(end - 1, 0.75), (end, 0.25)])


@pytest.mark.parametrize(
    ("split", "greedy", "evaluated", "reward", "scores"),
    [
        ("eval", False, "exact_match", 0.0, {"exact_match": 0.0}),
        ("eval", False, None, 1.0, {"digit_match": 0.5, "exact_match": 0.0}),
        ("train", True, "exact_match", 1.0, {"digit_match": 0.5, "exact_match": 0.0}),
    ],
    ids=["evaluation-reward", "training-reward", "baseline"],
)
async def test_evaluations_and_baselines_are_greedy(
    player: MakePlayer, split: Split, greedy: bool, evaluated: str | None, reward: float, scores: dict[str, float]
) -> None:
    engine = ScriptedEngine([HALF])
    playing = player(engine, evaluated=evaluated, min_episodes=2)
    (trajectory,) = await playing.play(split, 0, samples=1, greedy=greedy)
    assert engine.asked == [(ids("12r"), 1, True)]
    assert (trajectory.reward, trajectory.scores) == (reward, scores)


async def test_held_out_task_is_sampled_for_several_answers(player: MakePlayer) -> None:
    engine = ScriptedEngine([HALF, DONE, DONE])
    playing = player(engine, evaluated="exact_match")
    trajectories = await playing.play("eval", 0, samples=3)
    assert engine.asked == [(ids("12r"), 3, False)]
    assert [one.reward for one in trajectories] == [0.0, 1.0, 1.0]
    assert [one.scores[m.MAJORITY] for one in trajectories] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("greedy", [False, True])
async def test_overlong_penalty_applies_to_training_only(player: MakePlayer, greedy: bool) -> None:
    answers = [DONE, completion(ids("213")), completion(ids("2"), finish_reason="length")]
    playing = player(*answers, overlong={"cache_tokens": 2, "penalty": 0.5})
    trajectories = await playing.play("train", 0, samples=3, greedy=greedy)
    assert [one.scores["overlong"] for one in trajectories] == [0.0, -0.25, -0.5]
    assert [one.reward - 2 * one.scores["digit_match"] for one in trajectories] == [0.0, -0.25, -0.5]
    for one in await playing.play("eval", 0, samples=3):
        assert "overlong" not in one.scores
        assert one.reward == 2 * one.scores["digit_match"]


async def test_evaluations_use_their_own_share_of_the_workers(
    player: MakePlayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    playing, shares = player(DONE), list[bool]()
    score = playing.scorer.score

    async def recorded(*arguments: Any, evaluation: bool, **others: Any) -> Any:
        shares.append(evaluation)
        return await score(*arguments, evaluation=evaluation, **others)

    monkeypatch.setattr(playing.scorer, "score", recorded)
    await playing.play("eval", 0, samples=1)
    await playing.play("train", 0, samples=1)
    assert shares == [True, False]


@pytest.mark.parametrize(
    ("prompt", "reason", "detail"),
    [
        ("123456r", "prompt_too_long", "7 prompt tokens; rollout.engine.max_model_len"),
        ("", "prompt_empty", "0 prompt tokens"),
        ("12x", "prompt_untokenizable", "UNK"),
        (KeyError("row 0"), "env_error", "KeyError: 'row 0'"),
        (SystemExit("no data"), "env_error", "SystemExit: no data"),
        (asyncio.CancelledError("its own"), "env_error", "CancelledError: its own"),
        (KeyboardInterrupt(), "env_error", "KeyboardInterrupt: "),
        (Mute(), "env_error", "Mute: "),
        (None, "env_error", "TypeError"),
        ({"prompt": "12r", "reference": "21"}, "env_error", "TypeError"),
        (Task(prompt="12r", reference="21", info=cast("dict[str, int]", None)), "env_error", "TypeError"),
    ],
)
async def test_unusable_task_fails_its_group_only(player: MakePlayer, prompt: Any, reason: str, detail: str) -> None:
    engine = ScriptedEngine([DONE])
    playing = player(engine, prompts=("12r", prompt))
    failed = await failure(playing, 1)
    assert (failed.reason, detail in failed.detail) == (reason, True)
    assert engine.asked == []
    assert len(await playing.play("train", 0, samples=1)) == 1


async def test_tasks_are_read_one_at_a_time_in_one_thread(player: MakePlayer) -> None:
    env = Blocking(("12r", "13r", "14r"))
    playing = player(DONE, env=env)
    async with asyncio.timeout(60), asyncio.TaskGroup() as episodes:
        for index in range(3):
            episodes.create_task(playing.play("train", index, samples=1))
        while not env.called:
            await asyncio.sleep(0)
        assert env.called == [0]
        env.released.set()
    assert env.called == [0, 1, 2]
    assert len(env.threads) == 1
    assert threading.current_thread() not in env.threads


async def test_slow_task_fails_its_group_and_blocks_its_thread(player: MakePlayer) -> None:
    env = Blocking(("12r", "13r", "14r"))
    playing = player(DONE, env=env, group_deadline_s=0.2)
    for index in range(2):
        failed = await failure(playing, index)
        assert failed.reason == "env_error"
        assert "rollout.group_deadline_s=0.2" in failed.detail
    env.released.set()
    assert len(await playing.play("train", 2, samples=1)) == 1
    assert env.called == [0, 1, 2]
    assert len(env.threads) == 3


@pytest.mark.parametrize("split", ["train", "eval"])
async def test_answers_to_a_void_ticket_are_not_scored(player: MakePlayer, split: Split) -> None:
    failed = await failure(player(DONE, ticket_deadline_s=1e-9), split=split, samples=1)
    assert (failed.reason, failed.lengths) == ("scoring_timeout", [2])


RAISES: Any = ({"name": f"{__name__}:raises_for_214"},)


@pytest.mark.parametrize(("split", "min_episodes"), [("train", 3), ("eval", 2)])
async def test_too_few_scored_episodes_fail_their_group(player: MakePlayer, split: Split, min_episodes: int) -> None:
    playing = player(DONE, completion(ids("214")), DONE, rewards=RAISES, min_episodes=min_episodes)
    failed = await failure(playing, split=split, samples=3)
    assert (failed.reason, failed.lengths) == ("reward_error", [2, 3, 2])
    assert "ZeroDivisionError" in failed.detail


async def test_episode_without_a_score_is_left_out(player: MakePlayer) -> None:
    playing = player(DONE, completion(ids("214")), HALF, CUT, rewards=RAISES, group_size=4)
    scored = await playing.score(await playing.generate("train", 0, samples=4))
    assert [(one.episode, one.reward) for one in scored.trajectories] == [(0, 1.0), (1, 1.0)]
    assert scored.lost == {"reward_error": [3]}


def raises_for_214(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    return 1.0 / float(answer != "214")


async def test_enough_finished_answers_are_scored_at_the_deadline(player: MakePlayer) -> None:
    trajectories = await player(CUT, DONE, CUT, HALF, min_episodes=2).play("train", 0, samples=4)
    assert [trajectory.scores["digit_match"] for trajectory in trajectories] == [1.0, 0.5]
    # A task with fewer samples than the minimum; its prompt just fits.
    assert len(await player(DONE, prompts=("12345r",), min_episodes=2).play("train", 0, samples=1)) == 1


@pytest.mark.parametrize(
    ("finished", "rollout", "split"),
    [
        (1, {"min_episodes": 2}, "train"), (3, {"min_episodes": 4}, "train"), (1, {"group_size": 4}, "train"),
        (0, {"min_episodes": 2}, "train"), (2, {"min_episodes": 2}, "eval"),
    ],
)  # fmt: skip
async def test_too_few_finished_answers_fail_and_count_their_tokens(
    player: MakePlayer, finished: int, rollout: dict[str, Any], split: Split
) -> None:
    answers = [DONE] * finished + [CUT] * (4 - finished)
    tally = Tally()
    failed = await failure(player(*answers, group_deadline_s=3, **rollout), split=split, samples=4, tally=tally)
    assert (failed.reason, tally.sampled) == ("generation_timeout", 2 * finished + 4 - finished)
    assert f"{finished} of 4" in failed.detail


async def test_finished_answers_of_a_crashed_engine_are_kept(player: MakePlayer) -> None:
    dying = ScriptedEngine(failure=EngineError("vLLM died", [DONE, CUT, DONE, CUT]))
    limits: dict[str, Any] = {"min_episodes": 2, "group_deadline_s": 0.1}
    engine = lasting(dying, player.config(**limits).rollout)
    assert len(await player(engine, **limits).play("train", 0, samples=4)) == 2
    dying.failure = None
    await engine.close()


class StuckEngine(ScriptedEngine):
    """Ignores its deadline."""

    async def generate(self, request: Request) -> list[Completion]:
        return await asyncio.Future()


async def test_engine_that_ignores_the_deadline_fails_the_group(
    player: MakePlayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "ENGINE_GRACE_S", 0.02)
    failed = await failure(player(StuckEngine(), group_deadline_s=0.1))
    assert failed.reason == "generation_timeout"


async def test_refused_request_fails_the_group_dead_engine_does_not(player: MakePlayer) -> None:
    failed = await failure(player(ScriptedEngine(failure=RequestRefused("token 40"))))
    assert (failed.reason, "token 40" in failed.detail) == ("request_refused", True)
    with pytest.raises(EngineError, match="vLLM died"):
        await player(ScriptedEngine(failure=EngineError("vLLM died"))).play("train", 0, samples=1)
