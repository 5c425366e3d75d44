"""Filters on arrival: the episodes of a group that are used, by the configured filters in their order.

Policy filtration (PF-PPO) resamples the answers of a group by the rank of their reward.

Source: Zhang et al. 2025, "Policy Filtration for RLHF to Mitigate Noise in Reward Models", arXiv 2409.06957v5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, assert_never

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.configs.schema.buffer import DynamicSamplingConfig, Filter, FiltrationConfig, LengthFilterConfig

# N answers of a group

Strategy = Literal["best_of_n", "best_random", "best_worst", "pow"]
Outcome = Literal["solved", "unsolved", "mixed"]

MIN_SPREAD: Final = 1e-6
"""`dynamic_sampling` drops groups whose largest reward exceeds their smallest by no more than this."""
SOLVED_ABOVE: Final = 0.5
"""A task whose group has no spread and a mean reward above this counts as solved, otherwise as unsolved."""


class EpisodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of an episode that the filters use."""

    tokens: int
    """Action tokens of all its trajectories."""
    reward: float
    """Finite."""
    scores: Mapping[str, float]
    """Each reward term before weighting."""
    truncated: bool
    """Ended by its limit of tokens."""


@dataclass(frozen=True)
class Verdict:
    """The filters' verdict on a group."""

    keep: tuple[int, ...]
    """Indices of the episodes that are used, ascending, repeated as PF-PPO draws them; empty: the group is dropped."""
    dropped: tuple[tuple[int, str], ...]
    """Index and reason of every episode that is not used, in the order of the filters that dropped them."""
    outcome: Outcome | None
    """The task's outcome by the last `dynamic_sampling` filter that was applied; None without one."""

    @property
    def reason(self) -> str | None:
        """The filter that dropped the group's last episodes; None if the group is used."""
        return None if self.keep else self.dropped[-1][1]


def apply_filters(
    episodes: Sequence[EpisodeFacts], filters: Sequence[Filter], rng: np.random.Generator | None
) -> Verdict:
    """Applies the filters in order, each to the episodes that the earlier ones kept.

    The reason of a drop is the filter's name. `length` drops the whole group when it leaves fewer than two of at
    least two episodes, because group-relative advantages need two. Without filters every episode is kept.

    Args:
        rng: may be None if no filter draws (`draws`).

    Raises: ValueError if there are no episodes, KeyError if one lacks the score of `dynamic_sampling`.
    """
    if not episodes:
        raise ValueError("a group without episodes can't be filtered")
    keep = list(range(len(episodes)))
    dropped: dict[int, str] = {}
    outcome: Outcome | None = None
    for config in filters:
        seen = keep
        match config:
            case DynamicSamplingConfig():
                outcome = task_outcome([_score(episodes[index], config) for index in seen])
                keep = seen if outcome == "mixed" else []
            case LengthFilterConfig():
                keep = [index for index in seen if _has_fitting_length(episodes[index], config)]
                if len(keep) < min(2, len(seen)):
                    keep = []
            case FiltrationConfig():
                assert rng is not None, "a filter that draws needs random numbers"
                rewards = [episodes[index].reward for index in seen]
                drawn = filtrate(rewards, strategy=config.strategy, exponent=config.exponent, keep=config.keep, rng=rng)
                keep = [seen[position] for position in drawn]
            case _:
                assert_never(config)
        dropped |= dict.fromkeys(sorted(set(seen) - set(keep)), config.name)
        if not keep:
            break
    return Verdict(keep=tuple(keep), dropped=tuple(dropped.items()), outcome=outcome)


def group_outcome(episodes: Sequence[EpisodeFacts], filters: Sequence[Filter]) -> Outcome:
    """The outcome over all episodes of a group, also those that filters drop.

    Judged by the score of the first `dynamic_sampling` filter, otherwise by the reward.
    """
    config = next((chosen for chosen in filters if isinstance(chosen, DynamicSamplingConfig)), None)
    return task_outcome([episode.reward if config is None else _score(episode, config) for episode in episodes])


def draws(filters: Sequence[Filter]) -> bool:
    """True if one of the filters draws."""
    return any(isinstance(config, FiltrationConfig) for config in filters)


def task_outcome(rewards: Sequence[float]) -> Outcome:
    """`mixed` if the rewards differ by more than MIN_SPREAD, otherwise `solved` or `unsolved` by their mean.

    A single episode has no spread, so it is never mixed.

    Source: DAPO, arXiv 2503.14476, §3.2, eq. 11, which keeps the prompts with 0 < correct answers < N.
    """
    if max(rewards) - min(rewards) > MIN_SPREAD:
        return "mixed"
    return "solved" if sum(rewards) / len(rewards) > SOLVED_ABOVE else "unsolved"


def _score(episode: EpisodeFacts, config: DynamicSamplingConfig) -> float:
    return episode.reward if config.score is None else episode.scores[config.score]


def _has_fitting_length(episode: EpisodeFacts, config: LengthFilterConfig) -> bool:
    return (
        episode.tokens >= config.min_tokens
        and (config.max_tokens is None or episode.tokens <= config.max_tokens)
        and not (config.drop_truncated and episode.truncated)
    )


def rank_weights(rewards_N: Sequence[float], *, strategy: Strategy, exponent: float) -> NDArray[np.float64]:
    """Probability of drawing each answer of one prompt, in the order of `rewards_N`; shape [N], sum 1.

    Answers are ranked by falling reward; of equal rewards the lower index ranks higher.

    best_of_n    (1, 0, …, 0)
    best_random  (½, ½/(N-1), …, ½/(N-1))
    best_worst   (½, 0, …, 0, ½)
    pow          |reward|^exponent, normalised; uniform if all rewards are zero. Needs no rank.

    A single answer has weight 1 with every strategy.

    Raises: ValueError if there are no rewards, or one is not finite.
    Source: arXiv 2409.06957, §4 (weight vectors) and §5.4 (PPO-pow-k).
    """
    rewards = np.asarray(rewards_N, dtype=np.float64)
    answers = rewards.size
    if answers == 0 or not np.isfinite(rewards).all():
        raise ValueError(f"rewards={list(rewards_N)} must be one finite number or more")
    if answers == 1:
        return np.ones(1)
    if strategy == "pow":
        return _power_weights(np.abs(rewards), exponent)
    ranked = np.argsort(-rewards, kind="stable")
    weights = np.zeros(answers)
    match strategy:
        case "best_of_n":
            weights[ranked[0]] = 1.0
        case "best_random":
            weights[:] = 0.5 / (answers - 1)
            weights[ranked[0]] = 0.5
        case "best_worst":
            weights[ranked[[0, -1]]] = 0.5
    return weights


def _power_weights(sizes_N: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    largest = sizes_N.max()
    if largest == 0:
        return np.full(sizes_N.size, 1 / sizes_N.size)
    powers: NDArray[np.float64] = (sizes_N / largest) ** exponent  # scaled first: no overflow, and the same weights
    powers /= powers.sum()
    return powers


def filtrate(
    rewards_N: Sequence[float], *, strategy: Strategy, exponent: float, keep: int, rng: np.random.Generator
) -> tuple[int, ...]:
    """Draws `keep` answers by their `rank_weights`, with replacement; indices, ascending.

    Raises: ValueError if there are no rewards, or one is not finite.
    Source: arXiv 2409.06957, §4 (draws from the filtered policy).
    """
    weights = rank_weights(rewards_N, strategy=strategy, exponent=exponent)
    return tuple(sorted(rng.choice(weights.size, size=keep, p=weights).tolist()))
