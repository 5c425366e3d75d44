"""Episodes for rewards."""

from collections.abc import Mapping
from typing import Any

from slipstream.rewards.base import Episode, EpisodeTurn

NOTHING: Mapping[str, Any] = {}


def episode(answer: str, reference: str = "5", info: Mapping[str, Any] = NOTHING) -> Episode:
    """A single turn: 3 prompt tokens, and one token for each character of the answer."""
    turn = EpisodeTurn(text=answer, tokens=len(answer), end=3 + len(answer))
    return Episode(prompt="2+3=", reference=reference, info=info, turns=(turn,), prompt_tokens=3, finish_reason="stop")
