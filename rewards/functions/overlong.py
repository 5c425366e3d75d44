"""A soft limit of the length: what an answer loses that comes close to the most tokens it may have."""

from typing import Final

SCORE: Final = "overlong"
"""The name under which the penalty is recorded among an answer's scores."""


def overlong(tokens: int, *, truncated: bool, max_tokens: int, cache_tokens: int, penalty: float) -> float:
    """What is added to the reward of an answer of `tokens` tokens, in [-penalty, 0].

    0 up to max_tokens - cache_tokens, from there linearly down to -penalty at max_tokens; -penalty if it is truncated.

    Source: DAPO, arXiv 2503.14476, eq. 13, whose penalty is 1.
    """
    left = 0 if truncated else max_tokens - tokens
    return penalty * (min(max(left / cache_tokens, 0.0), 1.0) - 1.0)
