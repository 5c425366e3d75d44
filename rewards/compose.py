"""Scores of one answer, and their sum that is trained on. Pure functions."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from slipstream.configs.runtime.errors import format_error
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Reward, RewardFailed

LARGEST_SCORE = 1e15
"""Beyond it, sums of squares are infinite in the float32 that the learner computes with: it would skip every update."""
_LONGEST_DETAIL = 500  # characters: a user's message ends up in counters and logs


def weighted(scores: Mapping[str, float], terms: Sequence[RewardConfig]) -> float:
    """The sum of weight times score over `terms`; scores that no term names don't count.

    Raises: KeyError if a term has no score.
    """
    return math.fsum(term.weight * scores[term.name] for term in terms)


def score_answers(
    rewards: Mapping[str, Reward], answers: Sequence[str], reference: str, info: Mapping[str, Any]
) -> list[dict[str, float]]:
    """One dict from name to score for each answer.

    Raises: RewardFailed (`reward_error`) at the first reward that raises or returns no number of at most
        `LARGEST_SCORE`.
    """
    return [
        {name: _score(name, reward, answer, reference, info) for name, reward in rewards.items()} for answer in answers
    ]


def _score(name: str, reward: Reward, answer: str, reference: str, info: Mapping[str, Any]) -> float:
    try:
        score: object = reward(answer, reference, info)
        if not isinstance(score, Real) or not math.isfinite(score):
            raise TypeError(f"returned {score!r}, which is no finite number")
        if abs(float(score)) > LARGEST_SCORE:
            raise ValueError(f"returned {score!r}, which is beyond {LARGEST_SCORE:g} in size")
        return float(score)
    # Whatever a user's plug-in raises, a sys.exit() or a panic of Rust included, costs this group and nothing else.
    # Nobody else interrupts this thread: a KeyboardInterrupt or a CancelledError here is the plug-in's too.
    except BaseException as error:
        raise RewardFailed("reward_error", f"{name}: {format_error(error)}"[:_LONGEST_DETAIL]) from error
