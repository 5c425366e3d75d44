"""Text of gymnasium's observations, and actions read from text."""

import asyncio
from collections.abc import Sequence
from typing import Any

import gymnasium
import pytest

from slipstream.env.adapters.gymnasium import Gymnasium, uncoloured
from slipstream.env.base import Action, Turn


def test_colours_become_brackets() -> None:
    assert uncoloured("\x1b[41mS\x1b[0mFF") == "[S]FF"
    assert uncoloured("\x1b[34;1mR\x1b[0m \x1b[35m\x1b[43m \x1b[0m\x1b[0m") == "[blue:R] [magenta:[yellow: ]]"


def test_taxi_is_shown_with_its_places() -> None:
    env = Gymnasium("Taxi-v4")

    async def prompt() -> Any:
        session = env.session(env.task("train", 3))
        try:
            return await session.reset()
        finally:
            await session.close()

    (message,) = asyncio.run(prompt())
    assert message["role"] == "user"
    assert "pickup" in message["content"]
    board = message["content"].partition("\n\n")[2]
    assert all(place in board for place in ("[yellow:", "[blue:", "[magenta:"))
    assert "\x1b" not in board


class Echo(gymnasium.Env[Any, Any]):
    """Shows its last action, in the space that it is made with."""

    def __init__(self, space: Any) -> None:
        self.action_space = space
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return "begin", {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return action, 0.5, False, True, {}


@pytest.mark.parametrize(
    ("space", "text", "shown"),
    [
        (gymnasium.spaces.MultiDiscrete([3, 4]), "first 9 9, then 2 and 3", "[2, 3]"),
        (gymnasium.spaces.MultiBinary(3), "1 0 1", "[1, 0, 1]"),
        (gymnasium.spaces.Text(3), " abc\n", "abc"),
        (gymnasium.spaces.Discrete(3, start=5), "6 or 7", "7"),
    ],
)
def test_actions_of_other_spaces_are_read(space: Any, text: str, shown: str) -> None:
    gymnasium.register("Echo-v0", lambda **_: Echo(space))
    try:
        turn, invalid = asyncio.run(_answers(Gymnasium("Echo-v0", chat=False), [text, "none"]))
    finally:
        gymnasium.registry.pop("Echo-v0")
    assert (turn.observation, turn.reward, turn.done) == (shown, 0.5, True)
    assert (invalid.reward, invalid.metrics) == (0.0, {"invalid_actions": 1.0})


async def _answers(env: Gymnasium, texts: Sequence[str]) -> list[Turn]:
    session = env.session(env.task("train", 0))
    try:
        await session.reset()
        return [await session.step(Action(text, ())) for text in texts]
    finally:
        await session.close()
