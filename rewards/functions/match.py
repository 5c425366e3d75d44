"""Rewards that compare an answer with the reference, character by character."""

from collections.abc import Mapping
from typing import Any


def exact_match(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    """1.0 if the answer equals the reference, else 0.0; white space around either does not count."""
    return float(answer.strip() == reference.strip())


def digit_match(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    """Share of the reference's positions at which the answer has the same character, in [0, 1].

    White space around either does not count; what the answer has beyond the reference's length gains nothing.

    Raises: ValueError if the reference is empty, because it has no positions to share.
    """
    wanted = reference.strip()
    if not wanted:
        raise ValueError("digit_match needs a reference of at least one character")
    pairs = zip(answer.strip(), wanted, strict=False)  # whichever is longer, its rest matches nothing
    return sum(given == right for given, right in pairs) / len(wanted)
