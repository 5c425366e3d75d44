"""Episodes of several turns, and failing sessions."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import structlog

from slipstream.buffer.wire import codec
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.configs.schema.run import RewardConfig, ScoringConfig
from slipstream.env.base import Task, Turn
from slipstream.models.digits import EOS, TOKENS
from slipstream.models.tokenizer import Tokenizer
from slipstream.rewards.base import Episode
from slipstream.rewards.registry import REWARDS
from slipstream.rewards.scorer import Scorer
from slipstream.rollout_servers.engines.base import Completion, Request
from slipstream.rollout_servers.rollouts import multi_turn
from slipstream.rollout_servers.rollouts.base import EpisodeFailed
from slipstream.rollout_servers.rollouts.multi_turn import MultiTurn
from slipstream.rollout_servers.rollouts.player import Player
from slipstream.rollout_servers.tally import UNFINISHED, Tally
from tests.rollout_servers.rollouts.dialogue import HANG, Dialogue, Script
from tests.rollout_servers.scripted import ScriptedEngine, build_player, completion, ids, lasting

DEADLINE_S = 30.0
END = TOKENS.index(EOS)

FIRST = completion([*ids("21"), END], version=3)
SECOND = completion([*ids("4"), END], version=4)


@dataclass
class Turns(ScriptedEngine):
    """Gives one answer for each request, by how many answers the context has already."""

    contexts: list[list[int]] = field(default_factory=list)
    room: list[int | None] = field(default_factory=list)

    async def generate(self, request: Request) -> list[Completion]:
        self.contexts.append(list(request.prompt_ids))
        self.room.append(request.max_tokens)
        return [self.answers[list(request.prompt_ids).count(END)]]


@pytest.fixture
async def make_player(model: Path) -> AsyncIterator[Callable[..., Player]]:
    made: list[Player] = []

    def make(env: Any, *answers: Completion, evaluated: str | None = None, **rollout: Any) -> Player:
        config = RunConfig.model_validate(
            {
                "model": {"build": "digits"},
                "rewards": [{"name": "exact_match"}, {"name": f"{__name__}:counts_turns", "weight": 0}],
                "eval": {"reward": evaluated},
                "scoring": {"workers": 0},
                "rollout": {"engine": {"max_model_len": 20}, "sampling": {"max_tokens": 10}} | rollout,
            }
        )
        engine = Turns(list(answers) or [FIRST, SECOND])
        made.append(build_player(config, model, lasting(engine, config.rollout), env=env))
        return made[-1]

    yield make
    for player in made:
        env = cast(Dialogue, player.env)
        assert env.opened == env.closed > 0
        assert isinstance(player._rollout, MultiTurn)
        player._rollout.close()


def counts_turns(episode: Episode) -> float:
    assert [turn.observation for turn in episode.turns] in (["5+", ""], [""])
    return len(episode.turns)


async def test_actions_and_observations_form_one_token_sequence(make_player: Callable[..., Player]) -> None:
    env = Dialogue()
    player = make_player(env)
    (trajectory,) = await player.play("train", 0, samples=1)

    tokens = [*ids("12r"), *ids("21"), END, *ids("5+"), *ids("4"), END]
    assert codec.token_ids(trajectory).tolist() == tokens
    assert codec.action_mask(trajectory).tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    np.testing.assert_array_equal(codec.behaviour_logprobs(trajectory), [0, 0, 0, -1, -2, -3, 0, 0, -1, -2])
    assert trajectory.spans == [m.VersionSpan(version=3, start=3, end=6), m.VersionSpan(version=4, start=8, end=10)]
    assert trajectory.finish_reason == "done"
    assert trajectory.rewards == [m.RewardSpan(end=6, value=0.25), m.RewardSpan(end=10, value=1.5)]
    assert trajectory.scores == {
        "exact_match": 1.0, f"{__name__}:counts_turns": 2.0, "env": 0.75, "env/hints": 3.0,
    }  # fmt: skip
    assert trajectory.reward == 1.75
    engine = player._rollout._policy.engine._restarts.engine  # type: ignore[attr-defined]
    assert engine.contexts == [tokens[:3], tokens[:8]], "generated tokens are never encoded again"
    assert engine.room == [10, 5]
    assert [(action.text, list(action.token_ids)) for action in env.actions] == [
        (text, [*ids(text), END]) for text in ("21", "4")
    ]
    assert threading.current_thread() not in env.threads


@pytest.mark.parametrize(("evaluated", "reward"), [(None, 1.75), ("exact_match", 1.0)], ids=["unset", "named"])
async def test_a_named_evaluation_reward_excludes_env_rewards(
    make_player: Callable[..., Player], evaluated: str | None, reward: float
) -> None:
    (trajectory,) = await make_player(Dialogue(), evaluated=evaluated).play("eval", 0, samples=1)
    assert (trajectory.reward, trajectory.scores["env"]) == (reward, 0.75)


def test_a_reward_may_not_have_the_name_of_env_rewards(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REWARDS.built_in, "env", REWARDS.built_in["exact_match"])
    scorer = Scorer([RewardConfig(name="env")], ScoringConfig(workers=0))
    with pytest.raises(ConfigError, match="'env'"):
        Player(
            Dialogue(), Tokenizer(model), ScriptedEngine(), scorer, RolloutConfig(), env_name="", ticket_deadline_s=1.0
        )


@pytest.mark.parametrize(
    ("answer", "observation"),
    [(completion(ids("21"), finish_reason="length"), "5+"), (FIRST, "5+5+5+5")],
    ids=["action", "observation"],
)
async def test_an_episode_ends_at_the_token_limit(
    make_player: Callable[..., Player], answer: Completion, observation: str
) -> None:
    env = Dialogue([Turn(observation, 0.5)])
    (trajectory,) = await make_player(env, answer).play("train", 0, samples=1)
    assert trajectory.finish_reason == "tokens"
    assert codec.token_ids(trajectory).tolist()[3:5] == ids("21")
    assert codec.action_mask(trajectory).tolist()[-1] == 1
    assert trajectory.scores["env"] == 0.5


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (Dialogue(prompt=KeyError("row")), "env_error"),
        (Dialogue([ValueError("no such move")]), "env_error"),
        (Dialogue([SystemExit(1)]), "env_error"),
        (Dialogue([asyncio.CancelledError("its own")]), "env_error"),
        (Dialogue(["5+"]), "env_error"),
        (Dialogue(prompt=5), "env_error"),
        (Dialogue([Turn([{"content": "no role"}])]), "env_error"),
        (Dialogue([Turn([{"role": "user", "content": "no template"}])]), "prompt_untokenizable"),
        (Dialogue([Turn("5+", float("nan"))]), "env_error"),
        (Dialogue([Turn("5+", -1e16)]), "env_error"),
        (Dialogue([Turn("5+", metrics={"hints": "one"})]), "env_error"),  # type: ignore[dict-item]
        (Dialogue([Turn("x")]), "prompt_untokenizable"),
        (Dialogue([HANG]), "env_error"),
        (Dialogue(prompt=HANG), "env_error"),
    ],
    ids=[
        "reset", "step", "exit", "cancelled", "no-turn", "no-prompt", "no-role", "no-template", "nan", "huge", "metric",
        "not-encodable", "hanging-step", "hanging-reset",
    ],
)  # fmt: skip
async def test_failing_session_fails_its_group(make_player: Callable[..., Player], env: Dialogue, reason: str) -> None:
    hangs = HANG in (env.prompt, *env.turns)
    tally = Tally()
    with pytest.raises(EpisodeFailed) as failed:
        player = make_player(env, group_deadline_s=0.3 if hangs else DEADLINE_S)
        await player.generate("train", 0, samples=2, tally=tally)
    assert failed.value.reason == reason
    assert (tally.sampled, tally.unused[reason]) == (3 * len(env.actions),) * 2
    assert ("rollout.group_deadline_s=0.3" in failed.value.detail) == hangs
    assert env.opened == 2


@dataclass
class OneFails(Dialogue):
    """The first session raises."""

    def session(self, task: Task) -> Script:
        script = super().session(task)
        if self.opened == 1:
            script.turns = iter([ValueError("no such move")])
        return script


async def test_failing_session_fails_one_episode_of_enough(make_player: Callable[..., Player]) -> None:
    env = OneFails()
    with structlog.testing.capture_logs() as logs:
        trajectories = await make_player(env, min_episodes=2).play("train", 0, samples=3)
    assert [(line["missing"], line["reason"]) for line in logs] == [(1, "env_error")]
    assert [trajectory.reward for trajectory in trajectories] == [1.75] * 2


async def test_an_unfinished_action_is_a_generation_timeout(make_player: Callable[..., Player]) -> None:
    env = Dialogue()
    cut = completion(ids("4"), finish_reason="abort")
    tally = Tally()
    with pytest.raises(EpisodeFailed) as failed:
        await make_player(env, FIRST, cut).generate("train", 0, samples=1, tally=tally)
    assert (failed.value.reason, tally.unused) == ("generation_timeout", {UNFINISHED: 4})


async def test_a_cancelled_episode_closes_its_session(make_player: Callable[..., Player]) -> None:
    env = Dialogue([HANG])
    playing = asyncio.create_task(make_player(env).play("train", 0, samples=1))
    async with asyncio.timeout(DEADLINE_S):
        while not env.actions:
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.wait([playing])
    assert playing.cancelled()


@pytest.mark.parametrize("closing", [ValueError("no"), HANG], ids=["raises", "hangs"])
async def test_session_that_does_not_close_keeps_its_episode(
    make_player: Callable[..., Player], closing: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_turn, "CLOSE_S", 0.05)
    assert len(await make_player(Dialogue(closing=closing)).play("train", 0, samples=1)) == 1
