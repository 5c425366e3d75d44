"""Rewards from the text of an answer: comparisons with the reference, its form, and the penalty for long answers."""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from slipstream.configs.runtime.errors import ConfigError
from slipstream.rewards.base import Episode, Score

OVERLONG: Final = "overlong"
"""Name of the penalty among an episode's scores."""


def exact_match(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    """1.0 if the answer equals the reference, else 0.0; white space around either does not count."""
    return float(answer.strip() == reference.strip())


def none(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    """0.0: for envs whose sessions give all rewards."""
    return 0.0


def digit_match(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    """Share of the reference's positions at which the answer has the same character, in [0, 1].

    White space around either does not count; what the answer has beyond the reference's length gains nothing.

    Raises: ValueError if the reference is empty, because it has no positions to share.
    """
    wanted = reference.strip()
    if not wanted:
        raise ValueError("digit_match needs a reference of at least one character")
    pairs = zip(answer.strip(), wanted, strict=False)  # whichever is longer: its rest matches nothing
    return sum(character == right for character, right in pairs) / len(wanted)


def overlong(tokens: int, *, truncated: bool, max_tokens: int, cache_tokens: int, penalty: float) -> float:
    """Penalty for an answer of `tokens` tokens, in [-penalty, 0].

    0 up to max_tokens - cache_tokens, from there linearly down to -penalty at max_tokens; -penalty if it is truncated.

    Source: DAPO, arXiv 2503.14476, eq. 13, whose penalty is 1.
    """
    left = 0 if truncated else max_tokens - tokens
    return penalty * (min(max(left / cache_tokens, 0.0), 1.0) - 1.0)


_OPTIONS = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(kw_only=True, config=_OPTIONS)
class Format:
    """1 if the answer has the form, else 0.

    Raises: ConfigError for a pattern that is no regular expression, or if there is neither pattern nor tag.
    """

    pattern: str | None = None
    """Regular expression that the whole answer matches, white space around it aside; `.` matches line ends too."""
    tags: tuple[str, ...] = ()
    """Tags such as `think`, `answer`: each pair `<tag>…</tag>` occurs once, and one behind the other."""

    def __post_init__(self) -> None:
        if self.pattern is None and not self.tags:
            raise ConfigError("format needs options: pattern or tags")
        try:
            self._pattern = re.compile(self.pattern or ".*", re.DOTALL)
        except re.error as error:
            raise ConfigError(f"format's pattern {self.pattern!r} is no regular expression: {error}") from None

    def __call__(self, answer: str, reference: str, info: Mapping[str, Any]) -> float:
        """1 if the answer has the form, else 0."""
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        places = [answer.find(mark) for mark in marks]
        has_tags = places == sorted(places) and all(answer.count(mark) == 1 for mark in marks)
        return float(has_tags and self._pattern.fullmatch(answer.strip()) is not None)


@dataclass(kw_only=True, config=_OPTIONS)
class Length:
    """1 if the answer's length is from `least` to `most`; beyond either it falls linearly to 0 within `margin`.

    Raises: ConfigError if least > most.
    """

    least: int = Field(default=0, ge=0)
    """Shortest length without loss."""
    most: int = Field(ge=0)
    """Longest length without loss."""
    margin: int = Field(default=0, ge=0)
    """Length of the slopes; 0: none."""
    unit: Literal["tokens", "words", "characters"] = "tokens"
    """Unit of the lengths; tokens are those of all turns."""

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ConfigError(f"length: least={self.least} is more than most={self.most}")

    def __call__(self, episode: Episode) -> Score:
        """The part `length` is the length itself."""
        length = {
            "tokens": lambda: episode.tokens,
            "words": lambda: len(episode.answer.split()),
            "characters": lambda: len(episode.answer),
        }[self.unit]()
        outside = max(self.least - length, length - self.most, 0)
        return Score(max(0.0, 1.0 - outside / (self.margin + 1)), {"length": length})


@dataclass(kw_only=True, config=_OPTIONS)
class Repetition:
    """Penalty in [-1, 0]: minus the share of the answer's n-grams of words that occurred in it before."""

    n: int = Field(default=3, ge=1)
    """Words of an n-gram."""
    allowed: float = Field(default=0.0, ge=0, lt=1)
    """Share without penalty; above it the penalty grows linearly to -1."""

    def __call__(self, answer: str, reference: str, info: Mapping[str, Any]) -> float:
        """The penalty, in [-1, 0]."""
        words = answer.lower().split()
        grams = [tuple(words[start : start + self.n]) for start in range(len(words) - self.n + 1)]
        if not grams:
            return 0.0
        repeated = 1 - len(set(grams)) / len(grams)
        return min(0.0, (self.allowed - repeated) / (1 - self.allowed))
