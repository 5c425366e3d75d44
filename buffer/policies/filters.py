"""Which answers of a group are used: the configured filters, in their order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import numpy as np

from slipstream.buffer.policies.pf_ppo import filtrate
from slipstream.configs.schema.buffer import DynamicSamplingConfig, Filter, FiltrationConfig, LengthFilterConfig

Outcome = Literal["solved", "unsolved", "mixed"]

MIN_SPREAD: Final = 1e-6
"""`dynamic_sampling` drops groups whose largest reward exceeds their smallest by no more than this."""
SOLVED_ABOVE: Final = 0.5
"""A task whose dropped group has a mean reward above this counts as solved, otherwise as unsolved."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a filter may look at."""

    tokens: int
    """Action tokens."""
    reward: float
    """Finite."""
    scores: Mapping[str, float]
    """Each reward term before weighting."""
    truncated: bool
    """Cut off at its limit of tokens."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of a group."""

    keep: tuple[int, ...]
    """Indices of the answers that are used, ascending, repeated as PF-PPO draws them; empty: the group is dropped."""
    dropped: tuple[tuple[int, str], ...]
    """Index and reason of every answer that is not used, in the order of the filters that dropped them."""
    outcome: Outcome | None
    """How the task went, as the last `dynamic_sampling` filter that saw the group judged it; None without one."""

    @property
    def reason(self) -> str | None:
        """Why the whole group was dropped: the filter that took its last answers; None if the group is used."""
        return None if self.keep else self.dropped[-1][1]


def judge(answers: Sequence[Answer], filters: Sequence[Filter], rng: np.random.Generator | None) -> Verdict:
    """Applies the filters in order, each to what the earlier ones left.

    The reason of a drop is the filter's name. `length` drops the whole group when it leaves fewer than two of at
    least two answers, because group-relative advantages need two. Without filters every answer is kept.

    Args:
        rng: None will do where no filter draws (`draws`).

    Raises: ValueError if there are no answers, KeyError if one lacks the score that `dynamic_sampling` judges.
    """
    if not answers:
        raise ValueError("a group without answers can't be judged")
    keep = list(range(len(answers)))
    dropped: dict[int, str] = {}
    outcome: Outcome | None = None
    for config in filters:
        seen = keep
        match config:
            case DynamicSamplingConfig():
                outcome = task_outcome([_judged(answers[index], config) for index in seen])
                keep = seen if outcome == "mixed" else []
            case LengthFilterConfig():
                keep = [index for index in seen if _has_fitting_length(answers[index], config)]
                if len(keep) < min(2, len(seen)):
                    keep = []
            case FiltrationConfig():
                assert rng is not None, "a filter that draws needs random numbers"
                rewards = [answers[index].reward for index in seen]
                drawn = filtrate(rewards, strategy=config.strategy, exponent=config.exponent, keep=config.keep, rng=rng)
                keep = [seen[position] for position in drawn]
        dropped |= dict.fromkeys(sorted(set(seen) - set(keep)), config.name)
        if not keep:
            break
    return Verdict(keep=tuple(keep), dropped=tuple(dropped.items()), outcome=outcome)


def draws(filters: Sequence[Filter]) -> bool:
    """Whether one of the filters draws."""
    return any(isinstance(config, FiltrationConfig) for config in filters)


def task_outcome(rewards: Sequence[float]) -> Outcome:
    """`mixed` if the rewards differ by more than MIN_SPREAD, otherwise whether their mean says solved.

    A single answer has no spread, so it is never mixed.

    Source: DAPO, arXiv 2503.14476, §3.2, eq. 11, which keeps the prompts with 0 < correct answers < N.
    """
    if max(rewards) - min(rewards) > MIN_SPREAD:
        return "mixed"
    return "solved" if sum(rewards) / len(rewards) > SOLVED_ABOVE else "unsolved"


def _judged(answer: Answer, config: DynamicSamplingConfig) -> float:
    return answer.reward if config.score is None else answer.scores[config.score]


def _has_fitting_length(answer: Answer, config: LengthFilterConfig) -> bool:
    return (
        answer.tokens >= config.min_tokens
        and (config.max_tokens is None or answer.tokens <= config.max_tokens)
        and not (config.drop_truncated and answer.truncated)
    )
