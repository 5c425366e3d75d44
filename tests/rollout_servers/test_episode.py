"""Single-turn episodes."""

import asyncio
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from slipstream.buffer.wire import codec
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.digits_model import EOS, TOKENS
from slipstream.env.base import Split, Task
from slipstream.rewards.runners.pool import Scorer
from slipstream.rollout_servers.engines.base import Completion, Engine, EngineError, RequestRefused
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.rollouts.single_turn import EpisodeFailed, Player
from slipstream.rollout_servers.tokenizer import Text
from tests.rollout_servers.scripted import ScriptedEngine, completion


def ids(text: str) -> list[int]:
    return [TOKENS.index(token) for token in text]


class Mute(Exception):
    def __repr__(self) -> str:
        raise ValueError

    __str__ = __repr__


@dataclass
class Prompts:
    """An env whose tasks are these prompts, all to be answered with 21; an exception is raised instead of a task."""

    prompts: tuple[Any, ...]
    info: Mapping[str, Any] = field(default_factory=dict)

    def size(self, split: Split) -> int:
        return len(self.prompts)

    def task(self, split: Split, index: int) -> Task:
        if isinstance(self.prompts[index], BaseException):
            raise self.prompts[index]
        return Task(prompt=self.prompts[index], reference="21", info=self.info)

    def fingerprint(self) -> str:
        return repr(self.prompts)


def player(
    model: Path,
    *prompts: Any,
    engine: ScriptedEngine,
    rewards: tuple[dict[str, Any], ...] = (),
    evaluated: str | None = None,
    **rollout: Any,
) -> Player:
    config = RunConfig.model_validate(
        {
            "model": {"path": model},
            "env": {"name": "jsonl"},
            "rewards": rewards or ({"name": "digit_match", "weight": 2}, {"name": "exact_match", "weight": 0}),
            "eval": {"reward": evaluated},
            "scoring": {"workers": 0},
            "rollout": {"engine": {"max_model_len": 10}, "sampling": {"max_tokens": 4}} | rollout,
        }
    )
    return Player(config, Prompts(prompts), Text(model), engine, Scorer.from_config(config))


async def failure(playing: Player, index: int = 0) -> EpisodeFailed:
    with pytest.raises(EpisodeFailed) as failed:
        await playing.play("train", index, samples=2)
    return failed.value


async def test_an_episode_leaves_a_trajectory_of_prompt_and_answer_for_every_sample(model: Path) -> None:
    engine = ScriptedEngine(
        [completion([*ids("21"), TOKENS.index(EOS)]), completion(ids("24"), finish_reason="length")]
    )
    first, second = await player(model, "12r", engine=engine).play("train", 0, samples=2)

    assert engine.asked == [(ids("12r"), 2, False)]
    assert codec.token_ids(first).tolist() == [*ids("12r"), *ids("21"), TOKENS.index(EOS)]
    assert codec.action_mask(first).tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(codec.behaviour_logprobs(first), [0, 0, 0, -1, -2, -3])
    assert first.spans == [m.VersionSpan(version=0, start=3, end=6)]
    assert (first.reward, first.scores) == (2.0, {"digit_match": 1.0, "exact_match": 1.0})
    assert (second.reward, second.scores) == (1.0, {"digit_match": 0.5, "exact_match": 0.0})
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")


async def test_a_held_out_task_is_answered_greedily_and_scored_by_the_evaluations_reward(model: Path) -> None:
    engine = ScriptedEngine([completion(ids("24"))])
    (trajectory,) = await player(model, "12r", engine=engine, evaluated="exact_match").play("eval", 0, samples=1)
    assert engine.asked == [(ids("12r"), 1, True)]
    assert (trajectory.reward, trajectory.scores) == (0.0, {"exact_match": 0.0})


async def test_a_held_out_task_is_scored_as_in_training_unless_told_otherwise(model: Path) -> None:
    engine = ScriptedEngine([completion(ids("24"))])
    (trajectory,) = await player(model, "12r", engine=engine).play("eval", 0, samples=1)
    assert (trajectory.reward, trajectory.scores) == (1.0, {"digit_match": 0.5, "exact_match": 0.0})


async def test_a_greedy_answer_is_scored_like_any_other(model: Path) -> None:
    engine = ScriptedEngine([completion(ids("24"))])
    (baseline,) = await player(model, "12r", engine=engine, min_group_size=2).play("train", 0, samples=1, greedy=True)
    assert engine.asked == [(ids("12r"), 1, True)]
    assert (baseline.reward, baseline.scores) == (1.0, {"digit_match": 0.5, "exact_match": 0.0})


@pytest.mark.parametrize("greedy", [False, True])
async def test_an_overlong_answer_loses_reward_and_its_scores_say_how_much(model: Path, greedy: bool) -> None:
    engine = ScriptedEngine(
        [completion(ids("21")), completion(ids("213")), completion(ids("2"), finish_reason="length")]
    )
    playing = player(model, "12r", engine=engine, overlong={"cache_tokens": 2, "penalty": 0.5})
    trajectories = await playing.play("train", 0, samples=3, greedy=greedy)
    assert [one.scores["overlong"] for one in trajectories] == [0.0, -0.25, -0.5]
    assert [one.reward - 2 * one.scores["digit_match"] for one in trajectories] == [0.0, -0.25, -0.5]


async def test_an_evaluation_is_not_about_length(model: Path) -> None:
    engine = ScriptedEngine([completion(ids("21"), finish_reason="length")])
    (trajectory,) = await player(model, "12r", engine=engine, overlong={"cache_tokens": 4}).play("eval", 0, samples=1)
    assert (trajectory.reward, trajectory.scores) == (2.0, {"digit_match": 1.0, "exact_match": 1.0})


async def test_an_evaluation_is_scored_as_one_so_that_it_does_not_hold_up_training(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    playing, asked = player(model, "12r", engine=ScriptedEngine([completion(ids("21"))])), list[bool]()
    score = playing.scorer.score

    async def noting(*arguments: Any, evaluation: bool, **others: Any) -> Any:
        asked.append(evaluation)
        return await score(*arguments, evaluation=evaluation, **others)

    monkeypatch.setattr(playing.scorer, "score", noting)
    await playing.play("eval", 0, samples=1)
    await playing.play("train", 0, samples=1)
    assert asked == [True, False]


@pytest.mark.parametrize(
    ("prompt", "reason", "detail"),
    [
        ("123456r", "prompt_too_long", r"7 prompt tokens.*max_model_len - rollout\.sampling\.max_tokens leaves 6"),
        ("", "prompt_empty", "0 prompt tokens"),
        ("12x", "prompt_untokenizable", "UNK"),
        (KeyError("row 0"), "env_error", "KeyError: 'row 0'"),
        (SystemExit("no data"), "env_error", "SystemExit: no data"),
        (asyncio.CancelledError("its own"), "env_error", "CancelledError: its own"),
        (KeyboardInterrupt(), "env_error", "KeyboardInterrupt: "),
        (Mute(), "env_error", "Mute: .its message can't be read: ValueError"),
    ],
)
async def test_a_task_that_can_not_be_asked_costs_that_task_and_is_named(
    model: Path, prompt: Any, reason: str, detail: str
) -> None:
    engine = ScriptedEngine([completion(ids("21"))])
    playing = player(model, "12r", prompt, engine=engine)
    with pytest.raises(EpisodeFailed, match=rf"task \(jsonl, train, 1\).*{detail}") as failed:
        await playing.play("train", 1, samples=2)
    assert failed.value.reason == reason
    assert engine.asked == []
    assert len(await playing.play("train", 0, samples=1)) == 1


class Careless(Prompts):
    """Gives its prompts away as they are."""

    def task(self, split: Split, index: int) -> Task:
        return self.prompts[index]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "task",
    [None, {"prompt": "12r", "reference": "21"}, Task(prompt="12r", reference="21", info=cast("dict[str, int]", None))],
    ids=["none", "dict", "info"],
)
async def test_what_an_env_gives_that_is_no_task_costs_that_task(model: Path, task: Any) -> None:
    sound = Task(prompt="12r", reference="21")
    playing = replace(player(model, engine=ScriptedEngine([DONE])), env=Careless((task, sound)))
    failed = await failure(playing)
    assert failed.reason == "env_error"
    assert re.search(r"task \(jsonl, train, 0\): .*(None|'12r').* is no Task whose info is a mapping", failed.detail)
    assert len(await playing.play("train", 1, samples=1)) == 1


@dataclass
class Deliberate(Prompts):
    """Gives no task until it may; records what it was asked for, and in which threads."""

    may_answer: threading.Event = field(default_factory=threading.Event)
    asked: list[int] = field(default_factory=list)
    threads: set[threading.Thread] = field(default_factory=set)

    def task(self, split: Split, index: int) -> Task:
        self.asked.append(index)
        self.threads.add(threading.current_thread())
        assert self.may_answer.wait(30), "nobody let it answer"
        return super().task(split, index)


async def test_an_env_that_takes_its_time_holds_up_nobody_else_and_is_asked_for_one_task_at_a_time(model: Path) -> None:
    env = Deliberate(("12r", "13r", "14r"))
    playing = replace(player(model, engine=ScriptedEngine([DONE])), env=env)
    async with asyncio.timeout(60), asyncio.TaskGroup() as episodes:
        for index in range(3):
            episodes.create_task(playing.play("train", index, samples=1))
        while not env.asked:
            await asyncio.sleep(0)
        assert env.asked == [0]
        env.may_answer.set()
    assert env.asked == [0, 1, 2]
    assert len(env.threads) == 1
    assert threading.current_thread() not in env.threads


async def test_a_task_for_which_the_env_takes_too_long_costs_its_group_and_the_next_one_is_still_given(
    model: Path,
) -> None:
    env = Deliberate(("12r", "13r", "14r"))
    playing = replace(player(model, engine=ScriptedEngine([DONE]), group_deadline_s=0.05), env=env)
    for index in range(2):
        failed = await failure(playing, index)
        assert failed.reason == "env_error"
        assert f"task (jsonl, train, {index}): no task within rollout.group_deadline_s=0.05" in failed.detail
    env.may_answer.set()
    playing = replace(player(model, engine=ScriptedEngine([DONE])), env=env, env_thread=playing.env_thread)
    assert len(await playing.play("train", 2, samples=1)) == 1
    assert env.asked == [0, 1, 2]
    assert len(env.threads) == 3, "whoever hangs keeps its thread"


@pytest.mark.parametrize("split", ["train", "eval"])
async def test_answers_to_a_ticket_that_is_void_by_now_are_not_scored(model: Path, split: Split) -> None:
    playing = player(model, "12r", engine=ScriptedEngine([DONE]))
    # Copied, because such a deadline must be longer than that of a group, which the env would not keep.
    buffer = playing.config.buffer.model_copy(update={"ticket_deadline_s": 1e-9})
    config = playing.config.model_copy(update={"buffer": buffer})
    with pytest.raises(EpisodeFailed, match=r"task \(jsonl, .*, 0\): scoring_timeout") as failed:
        await replace(playing, config=config).play(split, 0, samples=1)
    assert (failed.value.reason, failed.value.tokens) == ("scoring_timeout", 2)


async def test_a_prompt_that_just_fits_is_played(model: Path) -> None:
    engine = ScriptedEngine([completion(ids("21"))])
    assert await player(model, "12345r", engine=engine).play("train", 0, samples=1)


async def test_a_reward_that_raises_costs_the_group_and_its_tokens_are_counted(model: Path) -> None:
    engine = ScriptedEngine([completion(ids("21")), completion(ids("214"))])
    reward = {"name": f"{__name__}:raises_for_214"}
    failed = await failure(player(model, "12r", engine=engine, rewards=(reward,)))
    assert (failed.reason, failed.tokens) == ("reward_error", 5)
    assert "task (jsonl, train, 0)" in failed.detail
    assert "ZeroDivisionError" in failed.detail


def raises_for_214(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    return 1.0 / float(answer != "214")


async def test_a_request_that_the_engine_refuses_costs_the_group(model: Path) -> None:
    engine = ScriptedEngine(failure=RequestRefused("token 40 is not in the vocabulary"))
    failed = await failure(player(model, "12r", engine=engine))
    assert failed.reason == "request_refused"
    assert "task (jsonl, train, 0): token 40" in failed.detail


CUT = completion(ids("2"), finish_reason="abort")
DONE = completion(ids("21"))


async def test_a_group_that_lacks_answers_at_its_deadline_is_scored_and_used_if_enough_are_finished(
    model: Path,
) -> None:
    engine = ScriptedEngine([CUT, DONE, CUT, completion(ids("24"))])
    trajectories = await player(model, "12r", engine=engine, min_group_size=2).play("train", 0, samples=4)
    assert [trajectory.scores["digit_match"] for trajectory in trajectories] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("finished", "rollout"), [(1, {"min_group_size": 2}), (3, {}), (0, {"min_group_size": 2})], ids=str
)
async def test_a_group_with_too_few_answers_at_its_deadline_fails_and_its_tokens_are_counted(
    model: Path, finished: int, rollout: dict[str, Any]
) -> None:
    engine = ScriptedEngine([DONE] * finished + [CUT] * (4 - finished))
    playing = player(model, "12r", engine=engine, group_deadline_s=3, **rollout)
    with pytest.raises(EpisodeFailed, match=rf"{finished} of 4 answers.*rollout\.group_deadline_s=3") as failed:
        await playing.play("train", 0, samples=4)
    assert (failed.value.reason, failed.value.tokens) == ("generation_timeout", 2 * finished + 4 - finished)


async def test_a_task_asked_fewer_times_than_a_group_may_lack_is_used_when_all_have_finished(model: Path) -> None:
    playing = player(model, "12r", engine=ScriptedEngine([DONE]), min_group_size=2)
    assert len(await playing.play("train", 0, samples=1)) == 1


async def test_a_group_whose_engine_died_and_is_not_back_at_its_deadline_keeps_the_answers_that_were_finished(
    model: Path,
) -> None:
    dying = ScriptedEngine(failure=EngineError("vLLM died", [DONE, CUT, DONE, CUT]))

    async def start() -> Engine:
        return await asyncio.Future()

    config = player(model, "12r", engine=dying, min_group_size=2, group_deadline_s=0.1).config
    engine = RestartingEngine(dying, start, config.rollout)
    playing = Player(config, Prompts(("12r",)), Text(model), engine, Scorer.from_config(config))
    assert len(await playing.play("train", 0, samples=4)) == 2
    dying.failure = None
    await engine.close()


async def test_an_evaluation_is_never_scored_on_a_part_of_its_answers(model: Path) -> None:
    playing = player(model, "12r", engine=ScriptedEngine([DONE, DONE, CUT]), min_group_size=2)
    with pytest.raises(EpisodeFailed, match="2 of 3 answers"):
        await playing.play("eval", 0, samples=3)


class StuckEngine(ScriptedEngine):
    """Does not even keep its deadline."""

    async def generate(self, *asked: object, **how: object) -> list[Completion]:
        return await asyncio.Future()


async def test_an_engine_that_does_not_keep_the_deadline_costs_the_group_and_not_the_server(model: Path) -> None:
    playing = replace(player(model, "12r", engine=StuckEngine(), group_deadline_s=0.02), engine_grace_s=0.02)
    failed = await failure(playing)
    assert failed.reason == "generation_timeout"
    assert "the engine does not answer" in failed.detail


async def test_the_death_of_the_engine_is_no_failed_episode(model: Path) -> None:
    engine = ScriptedEngine(failure=EngineError("vLLM died"))
    with pytest.raises(EngineError, match="vLLM died"):
        await player(model, "12r", engine=engine).play("train", 0, samples=1)
