"""Built-in rewards: comparisons of an answer with the reference, and the penalty for long answers."""

from collections.abc import Mapping
from typing import Any, Final

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
    return sum(given == right for given, right in pairs) / len(wanted)


def overlong(tokens: int, *, truncated: bool, max_tokens: int, cache_tokens: int, penalty: float) -> float:
    """Penalty for an answer of `tokens` tokens, in [-penalty, 0].

    0 up to max_tokens - cache_tokens, from there linearly down to -penalty at max_tokens; -penalty if it is truncated.

    Source: DAPO, arXiv 2503.14476, eq. 13, whose penalty is 1.
    """
    left = 0 if truncated else max_tokens - tokens
    return penalty * (min(max(left / cache_tokens, 0.0), 1.0) - 1.0)
