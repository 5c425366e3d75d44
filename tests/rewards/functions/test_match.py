"""The built-in comparisons, and the penalty for long answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rewards.functions.text import digit_match, exact_match, overlong

DIGITS = st.text("0123456789", max_size=6)


@given(answer=DIGITS, reference=DIGITS)
def test_only_equal_texts_match_exactly(answer: str, reference: str) -> None:
    assert exact_match(f" {answer}\n", reference, {}) == (1.0 if answer == reference else 0.0)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("321", 1.0), ("3219", 1.0), ("320", 2 / 3), ("32", 2 / 3), (" 321\n", 1.0), ("213", 0.0), ("9321", 0.0),
        ("", 0.0),
    ],
)  # fmt: skip
def test_digit_match_is_the_share_of_equal_positions(answer: str, score: float) -> None:
    assert digit_match(answer, "321", {}) == score


@given(answer=DIGITS, rest=DIGITS, reference=DIGITS.filter(bool))
def test_characters_beyond_the_reference_gain_nothing(answer: str, rest: str, reference: str) -> None:
    full = answer[: len(reference)].ljust(len(reference), "x")
    assert digit_match(full + rest, reference, {}) == digit_match(full, reference, {}) <= 1.0


def test_digit_match_refuses_an_empty_reference() -> None:
    with pytest.raises(ValueError, match="reference"):
        digit_match("1", " ", {})


def penalty_of(tokens: int, *, truncated: bool = False, penalty: float = 1.0) -> float:
    return overlong(tokens, truncated=truncated, max_tokens=20, cache_tokens=8, penalty=penalty)


@pytest.mark.parametrize(
    ("tokens", "added"), [(0, 0.0), (12, 0.0), (13, -0.125), (16, -0.5), (19, -0.875), (20, -1.0), (21, -1.0)]
)
def test_the_penalty_grows_linearly_over_the_cache(tokens: int, added: float) -> None:
    assert penalty_of(tokens) == added


def test_a_truncated_answer_gets_the_whole_penalty() -> None:
    assert penalty_of(3, truncated=True) == penalty_of(20, truncated=True) == -1.0


@given(tokens=st.integers(0, 25), truncated=st.booleans(), penalty=st.floats(0.01, 10))
def test_the_result_is_proportional_to_the_penalty(tokens: int, truncated: bool, penalty: float) -> None:
    assert penalty_of(tokens, truncated=truncated, penalty=penalty) == penalty * penalty_of(tokens, truncated=truncated)
