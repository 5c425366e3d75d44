"""Episodes of gymnasium: observations as text, actions read from text."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from slipstream.configs.runtime.errors import ConfigError, format_error, suggest
from slipstream.env.adapters.base import GeneratedGames, Prompt, ThreadedSession, as_prompt, release, require
from slipstream.env.base import Task, Turn

ACTIONS: Final[Mapping[str, Sequence[str]]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""Names of actions 0, 1, …, by the id without its version."""
INSTRUCTIONS: Final[Mapping[str, str]] = {
    "FrozenLake": "Cross the frozen lake from S to the goal G without falling into a hole H. You are in brackets.",
    "CliffWalking": "Walk from the lower left to the target T. x is your place, C the cliff: it takes you back.",
    "Taxi": (
        "Drive the taxi to the passenger, pick up, drive to the destination, drop off. [yellow:] is the empty taxi, "
        "[green:] the taxi with the passenger, [blue:] the passenger, [magenta:] the destination; | is a wall."
    ),
    "Blackjack": "Beat the dealer without exceeding 21. You see (your sum, the dealer's card, 1 if you hold an ace).",
}
_COLOURS: Final = {
    "30": "grey",
    "31": "red",
    "32": "green",
    "33": "yellow",
    "34": "blue",
    "35": "magenta",
    "36": "cyan",
}
_COLOURED: Final = re.compile(r"\x1b\[([\d;]+)m([^\x1b]*)\x1b\[0m")


class Gymnasium(GeneratedGames):
    """An env of gymnasium whose actions are discrete, several discrete ones, or a text.

    Args:
        id: as `gymnasium.make` takes it, such as `Taxi-v4`.
        make: further arguments of `gymnasium.make`, such as `{is_slippery: false}`.
        actions: names of the discrete actions in their order; unset: those of the toy texts, or the numbers.
        instructions: the begin of the prompt; unset: a line on the toy text, or nothing. The actions follow.
        size, eval_size, seed: number of train and held-out starts, and what they are drawn from.
        max_turns: actions of an episode, invalid ones too.
        invalid_reward: reward of an action that can't be read; the policy sees the valid ones and may try again.
        chat: observations are chat messages of the user; False: texts.

    Raises: ConfigError for an unknown id, or one whose actions can't be written as text.
    """

    @staticmethod
    def choices() -> tuple[str, list[str]]:
        """An option, and its values that the package offers. Raises: ConfigError when it is not installed."""
        return "id", sorted(require("gymnasium").registry)

    def __init__(  # noqa: PLR0913  (the keys of env.options)
        self,
        id: str,
        *,
        make: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        instructions: str | None = None,
        size: int = 10_000,
        eval_size: int = 256,
        seed: int = 0,
        max_turns: int = 100,
        invalid_reward: float = 0.0,
        chat: bool = True,
    ) -> None:
        make = dict(make or {})
        space, has_text = _probe(id, make)
        game, _, _ = id.partition("-")
        reader = _reader(space, id, ACTIONS.get(game) if actions is None else actions)
        begin = INSTRUCTIONS.get(game, "") if instructions is None else instructions
        self._rules = _Rules(
            id=id,
            make={**make, "render_mode": "ansi"} if has_text else make,
            reader=reader,
            instructions=f"{begin} {reader.described}".strip(),
            max_turns=max_turns,
            invalid_reward=invalid_reward,
            chat=chat,
        )
        options = [id, make, self._rules.instructions, max_turns, invalid_reward, chat]
        super().__init__(size, eval_size, seed, made_by=release("gymnasium"), options=options)

    def session(self, task: Task) -> ThreadedSession:
        """The episode that begins with the task's seed."""
        return ThreadedSession(_Episode(self._rules, task.info["seed"]), resumable=True)


def _probe(env_id: str, make: Mapping[str, Any]) -> tuple[Any, bool]:
    """The action space, and whether there is a rendering as text. Raises: ConfigError."""
    package = require("gymnasium")
    if env_id not in package.registry and ":" not in env_id:
        raise ConfigError(f"env gymnasium: there is no id {env_id!r}{suggest(env_id, list(package.registry))}")
    try:
        probe = package.make(env_id, disable_env_checker=True, **make)
    except Exception as error:  # named and raised again: constructors of envs raise anything, and their imports too
        raise ConfigError(f"env gymnasium: {env_id} can't be made: {format_error(error)}") from error
    try:
        return probe.action_space, "ansi" in probe.metadata.get("render_modes", [])
    finally:
        probe.close()


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """State shared by all episodes of an env."""

    id: str
    make: Mapping[str, Any]
    reader: "_Reader"
    instructions: str
    max_turns: int
    invalid_reward: float
    chat: bool


class _Episode:
    """One episode, as a `Game`."""

    def __init__(self, rules: _Rules, seed: int) -> None:
        self._rules = rules
        self._seed = seed
        self._turns = 0
        self._env: Any = None

    def reset(self) -> Prompt:
        rules = self._rules
        self._env = require("gymnasium").make(rules.id, disable_env_checker=True, **rules.make)
        observation, _ = self._env.reset(seed=self._seed)
        return as_prompt(f"{rules.instructions}\n\n{self._shown(observation)}", chat=rules.chat)

    def step(self, text: str) -> Turn:
        rules = self._rules
        self._turns += 1
        is_last = self._turns >= rules.max_turns
        action = rules.reader.read(text)
        if action is None:
            shown = as_prompt(f"Your answer has no valid action. {rules.reader.described}", chat=rules.chat)
            return Turn(shown, rules.invalid_reward, done=is_last, metrics={"invalid_actions": 1.0})
        observation, reward, terminated, truncated, _ = self._env.step(action)
        shown = as_prompt(self._shown(observation), chat=rules.chat)
        done = bool(terminated or truncated or is_last)
        return Turn(shown, float(reward), done=done, metrics={"invalid_actions": 0.0})

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _shown(self, observation: Any) -> str:
        if self._rules.make.get("render_mode") == "ansi":
            return uncoloured(self._env.render())
        return observation if isinstance(observation, str) else repr(_plain(observation))


def uncoloured(text: str) -> str:
    """Text in which terminal colours are brackets: `[x]`, or `[blue:x]` where several colours occur."""
    colours = {codes for codes, _ in _COLOURED.findall(text)}

    def bracketed(match: re.Match[str]) -> str:
        # A highlighted text has the code of its background, ten above that of the colour.
        codes = [str(int(code) - 10) if int(code) >= 40 else code for code in match[1].split(";")]
        colour = next((_COLOURS[code] for code in codes if code in _COLOURS), "")
        return f"[{colour}:{match[2]}]" if colour and len(colours) > 1 else f"[{match[2]}]"

    while (replaced := _COLOURED.sub(bracketed, text)) != text:  # colours may be nested
        text = replaced
    return text


def _plain(value: Any) -> Any:
    """numpy's arrays and numbers as Python's."""
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass(frozen=True)
class _Reader:
    """Reads the actions of a space from text.

    Attributes:
        described: the sentence for the policy.
        read: the action in a text, or None.
    """

    described: str
    read: Callable[[str], Any | None]


def _reader(space: Any, env_id: str, names: Sequence[str] | None) -> _Reader:
    """Raises: ConfigError for a space whose actions can't be written as text."""
    match type(space).__name__:
        case "Discrete":
            return _discrete(int(space.start), int(space.n), env_id, names)
        case "MultiDiscrete" | "MultiBinary":
            length = math.prod(space.sample().shape)
            return _Reader(
                f"Answer with {length} whole numbers, in the range of {space}.", lambda text: _numbers(space, text)
            )
        case "Text":
            return _Reader(
                "Answer with the action alone.", lambda text: text.strip() if space.contains(text.strip()) else None
            )
    raise ConfigError(
        f"env gymnasium: actions of {env_id} are a {type(space).__name__}; an action must be discrete, several "
        "discrete ones, or a text"
    )


def _discrete(start: int, count: int, env_id: str, names: Sequence[str] | None) -> _Reader:
    if names is not None and len(names) != count:
        raise ConfigError(f"env gymnasium: {env_id} has {count} actions, but {len(names)} names: {', '.join(names)}")
    numbers = {str(start + place): start + place for place in range(count)}
    by_name = {name.lower(): start + place for place, name in enumerate(names or ())}
    choices = sorted([*numbers, *by_name], key=len, reverse=True)
    # The last one counts: reasoning may mention others before.
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, choices))})(?!\w)", re.IGNORECASE)
    shown = ", ".join(names or numbers)

    def read(text: str) -> int | None:
        found = pattern.findall(text)
        return (numbers | by_name)[found[-1].lower()] if found else None

    return _Reader(f"Answer with one action: {shown}.", read)


def _numbers(space: Any, text: str) -> Any | None:
    """The last numbers in the text, as an action of the space."""
    shape = space.sample().shape
    found = [int(number) for number in re.findall(r"-?\d{1,9}", text)][-math.prod(shape) :]
    if len(found) != math.prod(shape):
        return None
    action = np.array(found, dtype=space.dtype).reshape(shape)
    return action if space.contains(action) else None
