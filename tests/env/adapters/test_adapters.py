"""The contract that every adapter keeps, on the real packages."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import EnvConfig
from slipstream.env.base import Action, SessionEnv, Split, Turn
from slipstream.env.registry import build_env


@dataclass(frozen=True)
class Case:
    """An env with a script of actions that ends an episode of its first train task.

    Attributes:
        wrong: an action that can't be applied.
        reward: of the whole script; None where it depends on the task.
    """

    name: str
    options: Mapping[str, Any]
    script: tuple[str, ...] = ()
    wrong: str = "no action"
    reward: float | None = None
    other: Mapping[str, Any] = field(default_factory=lambda: {"seed": 5})

    def build(self, **changes: Any) -> SessionEnv:
        return build_env(EnvConfig(name=self.name, options={**self.options, **changes}))  # type: ignore[return-value]


ROWS = Path(__file__).with_name("skyrl_rows.jsonl")
LAKE = {"id": "FrozenLake-v1", "make": {"is_slippery": False}, "size": 20, "eval_size": 5}
SESSIONS = [
    Case("gymnasium", LAKE, ("down", "I go down", "right, no: 2", "Down", "right", "right"), reward=1.0),
    Case("gymnasium", {"id": "Taxi-v4", "size": 20, "eval_size": 5, "max_turns": 3}, ("north", "east", "dropoff")),
    Case("gymnasium", {"id": "Blackjack-v1", "size": 20, "eval_size": 5}, ("stick",)),
    Case("textarena", {"game": "GuessTheNumber-v0", "size": 20, "eval_size": 5}, ("I say [99].", "no number"), "[77]"),
    Case("textarena", {"game": "TicTacToe-v0", "size": 20, "eval_size": 5}, ("[9]", "none"), reward=-1.0),
    Case("textarena", {"game": "2048-v0-mega-easy", "size": 20, "eval_size": 5}, ("sideways", "[back]")),
    Case(
        "skyrl_gym",
        {"path": str(ROWS), "env": "gsm8k_multi_turn"},
        ("no answer", "#### 5"),
        reward=1.0,
        other={"env_config": {"search_url": "none"}},
    ),
]


@pytest.fixture(params=SESSIONS, ids=lambda case: "-".join([case.name, *map(str, list(case.options.values())[:1])]))
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


async def _played(env: SessionEnv, script: tuple[str, ...], *, split: Split = "train", index: int = 0) -> list[Any]:
    """What an episode shows: its prompt and its turns."""
    session = env.session(env.task(split, index))
    try:
        shown: list[Any] = [await session.reset()]
        for text in script:
            shown.append(await session.step(Action(text, ())))
        return shown
    finally:
        await session.close()


def played(env: SessionEnv, script: tuple[str, ...], *, split: Split = "train", index: int = 0) -> list[Any]:
    return asyncio.run(_played(env, script, split=split, index=index))


def test_script_plays_an_episode_to_its_end(case: Case) -> None:
    _, *turns = played(case.build(), case.script)
    assert [turn.done for turn in turns] == [False] * (len(turns) - 1) + [True]
    if case.reward is not None:
        assert sum(turn.reward for turn in turns) == case.reward


def test_same_task_shows_the_same_in_every_process(case: Case) -> None:
    assert played(case.build(), case.script) == played(case.build(), case.script)


def test_concurrent_episodes_do_not_mix(case: Case) -> None:
    env = case.build()

    async def play_all() -> list[list[Any]]:
        return await asyncio.gather(*(_played(env, case.script) for _ in range(8)))

    alone = played(env, case.script)
    assert all(each == alone for each in asyncio.run(play_all()))


def test_fingerprint_changes_with_the_tasks_only(case: Case) -> None:
    assert case.build().fingerprint() == case.build().fingerprint()
    assert case.build(**case.other).fingerprint() != case.build().fingerprint()


def test_splits_have_different_tasks(case: Case) -> None:
    if "size" not in case.options:
        pytest.skip("its tasks are the rows of a file")
    env = case.build(size=50, eval_size=50)
    train, held_out = ({repr(env.task(split, index)) for index in range(50)} for split in ("train", "eval"))
    assert len(train) == len(held_out) == 50
    assert not train & held_out
    with pytest.raises(IndexError):
        env.task("train", 50)


def test_wrong_action_is_an_observation(case: Case) -> None:
    _, turn = played(case.build(), (case.wrong,))
    assert isinstance(turn, Turn)
    assert turn.observation
    assert not turn.done


def test_session_can_be_closed_before_its_reset(case: Case) -> None:
    env = case.build()
    asyncio.run(env.session(env.task("train", 0)).close())


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("gymnasium", {"id": "Taxi-v44"}, "Taxi-v4"),
        ("gymnasium", {"id": "Taxi-v3"}, "Taxi-v3"),  # not playable any more
        ("gymnasium", {"id": "CartPole-v1", "actions": ["left"]}, "2 actions"),
        ("gymnasium", {"id": "Pendulum-v1"}, "Box"),
        ("gymnasium", {"id": "Taxi-v4", "size": 0}, "env.options.size"),
        ("textarena", {"game": "TicTacTo-v0"}, "TicTacToe-v0"),
        ("textarena", {"game": "Wordle-v0"}, "nltk"),  # its words come from the network
        ("textarena", {"game": "SecretMafia-v0"}, "SecretMafia-v0"),  # for more players
        ("textarena", {"game": "TicTacToe-v0", "player": 2}, "player=2"),
        ("textarena", {"game": "TicTacToe-v0", "opponent": "randm"}, "'random'"),
        ("skyrl_gym", {"path": "absent.jsonl"}, "absent.jsonl"),
        ("skyrl_gym", {"path": str(ROWS)}, "skyrl_rows.jsonl:1: env_class"),
        ("skyrl_gym", {"path": str(ROWS), "env": "gsm8k", "eval_path": str(ROWS)}, "2 prompts"),
        ("openenv", {"url": "localhost:80"}, "ws://"),
        ("openenv", {"url": "ws://127.0.0.1:9"}, "http://127.0.0.1:9/schema"),
        ("reasoning_gym", {"dataset": "chain_sums"}, "'chain_sum'"),
        ("reasoning_gym", {"dataset": {"chain_sum": {"min_term": 2}, "leg_counting": {"weight": 0}}}, "min_term"),
        ("reasoning_gym", {"dataset": "chain_sum", "config": {"seed": 3}}, "seed"),
        ("reasoning_gym", {"dataset": {}}, "dataset={}"),
        ("reasoning_gym", {"dataset": "word_ladder"}, "PYTHONHASHSEED"),
    ],
)
def test_unusable_options_are_refused(
    name: str, options: Mapping[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=named):
        build_env(EnvConfig(name=name, options=dict(options)))


def test_missing_package_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"slipstream\[gymnasium\]"):
        build_env(EnvConfig(name="gymnasium", options={"id": "Taxi-v4"}))
