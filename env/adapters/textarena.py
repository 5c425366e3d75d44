"""Games of textarena: for one player, or against a scripted opponent."""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from threading import Lock
from typing import Any, Final

import numpy as np

from slipstream.configs.registry import Registry
from slipstream.configs.runtime.errors import ConfigError, format_error, suggest
from slipstream.env.adapters.base import GeneratedGames, Prompt, ThreadedSession, as_prompt, release, require
from slipstream.env.base import Task, Turn

Opponent = Callable[[str, random.Random], str]
"""The action after an observation."""
Message = tuple[int, str, Any]
"""Sender, text and type, as textarena has it."""

_RAW: Final = "-raw"
"""The names of games without wrappers, which would repeat the whole history in each observation."""
_GAME: Final = -1
_MOST_OPPONENT_TURNS: Final = 200
_BRACKETED: Final = re.compile(r"\[[^\[\]\n]+\]")

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_NLTK_DATA: Final = re.compile(r"Resource '?(\w+)'? not found")

_random_lock = Lock()
"""Games draw from the random generators of the process."""


def random_move(observation: str, rng: random.Random) -> str:
    """One of the moves in brackets in the last paragraph that has any: games list the possible ones there."""
    lists = [found for line in observation.splitlines() if (found := _BRACKETED.findall(line))]
    return rng.choice(lists[-1]) if lists else ""


OPPONENTS: Final = Registry("opponent", {"random": f"{__name__}:random_move"})


class Textarena(GeneratedGames):
    """A game of textarena for one player, or for two, of whom a script plays one.

    The reward is that of the package, at the end of the game. Games that need data from the network, or a service, are
    refused when the env is built.

    Args:
        game: as `textarena.make` takes it, such as `GuessTheNumber-v0` or `TicTacToe-v0`.
        opponent: `random` (one of the moves that the game lists in brackets), an entry point of group
            `slipstream.opponents`, or `module:attribute`: a function (observation, random.Random) -> action.
        player: 0 or 1, whom the policy plays against an opponent; unset: either, by task.
        make: further arguments of the game.
        size, eval_size, seed: number of train and held-out games, and what they are drawn from.
        chat: observations are chat messages of the user; False: texts.

    Raises: ConfigError for an unknown game, one that can't start, or one for more players.
    """

    def __init__(
        self,
        game: str,
        opponent: str = "random",
        player: int | None = None,
        make: Mapping[str, Any] | None = None,
        size: int = 10_000,
        eval_size: int = 256,
        seed: int = 0,
        chat: bool = True,
    ) -> None:
        with _without_output():
            require("textarena")
        self._game, self._make, self._player, self._chat = game, dict(make or {}), player, chat
        self._opponent: Opponent = OPPONENTS.load(opponent)
        if player not in (None, 0, 1):
            raise ConfigError(f"env textarena: player={player!r} must be 0, 1 or null")
        self._players = _count_players(game, self._make)
        options = [game, opponent, player, self._make, chat]
        super().__init__(size, eval_size, seed, made_by=release("textarena"), options=options)

    @staticmethod
    def choices() -> tuple[str, list[str]]:
        """An option, and its values that the package offers. Raises: ConfigError when it is not installed."""
        return "game", _games()

    def session(self, task: Task) -> ThreadedSession:
        """The game with the task's seed."""
        seed = task.info["seed"]
        player = 0 if self._players == 1 else seed % 2 if self._player is None else self._player
        match = _Match(_maker(self._game, self._make), self._players, player, seed, self._opponent, chat=self._chat)
        return ThreadedSession(match, resumable=True)


def _maker(game: str, make: Mapping[str, Any]) -> Callable[[], Any]:
    textarena = require("textarena")
    return lambda: textarena.make(game.removesuffix(_RAW) + _RAW, **make)


@contextmanager
def _without_output() -> Iterator[None]:
    """Context for the package's first import and for starting a game, which may try to download data.

    nltk prints how that fails to the stderr of its import; the game then raises an error, which is reported.
    """
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield


def _games() -> list[str]:
    """Names of the package's games, without those of their wrappers."""
    names = require("textarena", "textarena.envs.registration").ENV_REGISTRY
    return sorted(name.removesuffix(_RAW) for name in names if name.endswith(_RAW))


def _count_players(game: str, make: Mapping[str, Any]) -> int:
    """1 or 2; starts the game once. Raises: ConfigError."""
    known = _games()
    if game.removesuffix(_RAW) not in known:
        raise ConfigError(f"env textarena: there is no game {game!r}{suggest(game, known)}")
    problem = ""
    for players in (1, 2):
        state = _RandomState(0)
        try:
            with state.active(), _without_output():
                _maker(game, make)().reset(num_players=players, seed=0)
        # The package's games raise anything: for a wrong number of players an AssertionError, without their data a
        # LookupError of nltk, and some have syntax that this Python lacks.
        except Exception as error:  # noqa: BLE001
            if missing := _NLTK_DATA.search(_COLOURS.sub("", str(error))):
                raise ConfigError(
                    f"env textarena: {game} needs nltk's data {missing[1]!r}: python -m nltk.downloader {missing[1]}, "
                    "or without a network copy it from another machine's ~/nltk_data"
                ) from None
            problem = " ".join(format_error(error).split())[:300]
        else:
            return players
    raise ConfigError(f"env textarena: {game} can't be started for one or two players: {problem}")


class _RandomState:
    """A state of the process's random generators, which belongs to one game."""

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around what draws from it; one game at a time."""
        with _random_lock:
            outer = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(outer[0])
                np.random.set_state(outer[1])


class _Match:
    """One game, as a `Game`."""

    def __init__(
        self, make: Callable[[], Any], players: int, player: int, seed: int, opponent: Opponent, *, chat: bool
    ) -> None:
        self._make, self._players, self._player, self._seed = make, players, player, seed
        self._opponent, self._chat = opponent, chat
        self._random = _RandomState(seed)
        self._rng = random.Random(seed)
        self._game: Any = None

    def reset(self) -> Prompt:
        with self._random.active():
            self._game = self._make()
            self._game.reset(num_players=self._players, seed=self._seed)
            done, text = self._advance()
        if done:
            raise RuntimeError("the game ended before the policy's first move")
        return as_prompt(text, chat=self._chat)

    def step(self, text: str) -> Turn:
        # As the package's own wrapper has it: games look for moves in brackets only.
        action = text if "[" in text or "]" in text else f"[{text.strip()}]"
        with self._random.active():
            done, _ = self._game.step(action=action)
            text = ""
            if not done:
                done, text = self._advance()
            rewards, info = self._game.close() if done else ({}, {})
        if not done:
            return Turn(as_prompt(text, chat=self._chat))
        invalid = bool(info.get(self._player, {}).get("invalid_move"))
        return Turn(reward=float(rewards[self._player]), done=True, metrics={"ended_by_invalid_move": float(invalid)})

    def close(self) -> None:
        self._game = None

    def _advance(self) -> tuple[bool, str]:
        """Plays the opponent until it is the policy's turn; whether the game is over, and the policy's observation."""
        for _ in range(_MOST_OPPONENT_TURNS):
            player, messages = self._game.get_observation()
            text = _text(messages, own=player)
            if player == self._player:
                return False, text
            done, _ = self._game.step(action=self._opponent(text, self._rng))
            if done:
                return True, ""
        raise RuntimeError(f"the opponent made {_MOST_OPPONENT_TURNS} moves in a row")


def _text(messages: Sequence[Message], *, own: int) -> str:
    """New messages for a player; its own actions are in its context already."""
    return "\n".join(
        text if sender == _GAME else f"[Player {sender}] {text}" for sender, text, _ in messages if sender != own
    )
