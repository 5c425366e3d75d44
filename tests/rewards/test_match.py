"""The built-in comparisons and the weighted sum."""

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import RewardFailed
from slipstream.rewards.compose import score_answers, weighted
from slipstream.rewards.functions.match import digit_match, exact_match
from slipstream.rewards.registry import find_reward, find_rewards

DIGITS = st.text("0123456789", max_size=6)


@given(answer=DIGITS, reference=DIGITS)
def test_only_the_same_text_is_an_exact_match(answer: str, reference: str) -> None:
    assert exact_match(f" {answer}\n", reference, {}) == (1.0 if answer == reference else 0.0)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("321", 1.0),
        ("3219", 1.0),
        ("320", 2 / 3),
        ("32", 2 / 3),
        (" 321\n", 1.0),
        ("213", 0.0),
        ("9321", 0.0),
        ("", 0.0),
    ],
)
def test_digit_match_is_the_share_of_right_positions(answer: str, score: float) -> None:
    assert digit_match(answer, "321", {}) == score


@given(answer=DIGITS, rest=DIGITS, reference=DIGITS.filter(bool))
def test_an_answer_never_gains_by_what_goes_beyond_the_reference(answer: str, rest: str, reference: str) -> None:
    full = answer[: len(reference)].ljust(len(reference), "x")
    assert digit_match(full + rest, reference, {}) == digit_match(full, reference, {}) <= 1.0


def test_digit_match_refuses_an_empty_reference() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        digit_match("1", " ", {})


def test_the_sum_counts_each_term_by_its_weight_and_nothing_else() -> None:
    terms = [
        RewardConfig(name="a", weight=0.5),
        RewardConfig(name="b", weight=-2),
        RewardConfig(name="c", weight=0),
    ]
    assert weighted({"a": 1.0, "b": 0.25, "c": 9.0, "other": 7.0}, terms) == 0.0


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_a_weight_is_a_finite_number(weight: float) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        RewardConfig(name="a", weight=weight)


@pytest.mark.parametrize("score", [1e300, -sys.float_info.max, 10**400, 1e39])
def test_a_score_that_float32_can_not_reckon_with_is_the_rewards_error(score: float) -> None:
    with pytest.raises(RewardFailed, match=r"reward_error: huge: .*"):
        score_answers({"huge": lambda answer, reference, info: score}, ["a"], "b", {})
    exact = {"exact": lambda answer, reference, info: 1e15}
    assert score_answers(exact, ["a"], "b", {}) == [{"exact": 1e15}]


def test_a_term_without_a_score_is_an_error() -> None:
    with pytest.raises(KeyError, match="b"):
        weighted({"a": 1.0}, [RewardConfig(name="b")])


def test_rewards_are_found_by_name() -> None:
    assert find_reward("exact_match") is exact_match
    assert find_rewards(["digit_match", "exact_match"]) == {
        "digit_match": digit_match,
        "exact_match": exact_match,
    }


def test_every_reward_that_is_not_there_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        find_rewards(["exact_mach", "math:pi", "exact_match", "asyncio:sleep", "fractions:Fraction"])
    assert caught.value.problems == (
        "there is no reward 'exact_mach' (did you mean 'exact_match'?)",
        "reward 'math:pi' is a float, not a function (answer, reference, info) -> float",
        "reward 'asyncio:sleep' is a coroutine function, not a function (answer, reference, info) -> float",
        "reward 'fractions:Fraction' is a class, not a function (answer, reference, info) -> float",
    )
