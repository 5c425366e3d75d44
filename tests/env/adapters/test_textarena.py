"""Games of textarena: which start offline, and play against the scripted opponent."""

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.adapters.textarena import Textarena
from slipstream.env.base import Action
from tests.tools.run_command import slipstream

ALONE = (
    "2048-v0", "Bandit-v0", "Blackjack-v0", "Countdown-v0", "Cryptarithm-v0", "FifteenPuzzle-v0", "FrozenLake-v0",
    "GuessTheNumber-v0", "LightsOut-v0", "LogicPuzzle-v0", "Mastermind-v0", "Minesweeper-v0", "PegJump-v0",
    "RushHour-v0", "Secretary-v0", "Set-v0", "Slitherlink-v0", "Sokoban-v0", "Sudoku-v0-easy", "ThreeCardMonte-v0",
    "TowerOfHanoi-v0",
)  # fmt: skip
AGAINST_ANOTHER = ("ConnectFour-v0", "KuhnPoker-v0-short", "TicTacToe-v0", "UltimateTicTacToe-v0", "WildTicTacToe-v0")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("a test without network")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    yield


@pytest.mark.parametrize("game", ALONE)
def test_game_for_one_player_starts_offline_and_repeats(game: str) -> None:
    async def opening() -> object:
        session = env.session(env.task("train", 3))
        try:
            return await session.reset()
        finally:
            await session.close()

    env = Textarena(game)
    before = random.getstate()
    assert asyncio.run(opening()) == asyncio.run(opening())
    assert random.getstate() == before


@pytest.mark.parametrize("game", AGAINST_ANOTHER)
def test_random_players_reach_the_end_of_a_game(game: str) -> None:
    async def play(index: int) -> float:
        rng, session = random.Random(index), env.session(env.task("train", index))
        try:
            shown = str((await session.reset())[0])
            for _ in range(200):
                lists = [found for line in shown.split("\n") if (found := re.findall(r"\[[^\[\]\n]+\]", line))]
                turn = await session.step(Action(rng.choice(lists[-1]) if lists else "[0]", ()))
                if turn.done:
                    return turn.reward
                shown = str(turn.observation)
            raise AssertionError("200 turns and no end")
        finally:
            await session.close()

    env = Textarena(game, chat=False)
    rewards = [asyncio.run(play(index)) for index in range(6)]
    assert rewards == [asyncio.run(play(index)) for index in range(6)]
    assert set(rewards) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("game", ["Debate-v0", "WordLadder-v0"])
def test_game_that_needs_a_service_or_data_is_refused(game: str) -> None:
    with pytest.raises(ConfigError, match=game):
        Textarena(game)


def test_missing_data_is_one_line_with_its_remedy(tmp_path: Path) -> None:
    # A process of its own: nltk keeps the stderr of its import.
    done = slipstream("try", "textarena", "env.options={game: Hangman-v0}", "--keyboard", folder=tmp_path)
    (line,) = done.stderr.splitlines()
    assert all(part in line for part in ("Hangman-v0", "nltk.downloader words"))
    assert (done.returncode, done.stdout) == (2, "")
