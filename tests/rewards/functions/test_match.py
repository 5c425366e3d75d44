"""The built-in comparisons."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rewards.functions.match import digit_match, exact_match

DIGITS = st.text("0123456789", max_size=6)


@given(answer=DIGITS, reference=DIGITS)
def test_only_equal_texts_match_exactly(answer: str, reference: str) -> None:
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
def test_digit_match_is_the_share_of_equal_positions(answer: str, score: float) -> None:
    assert digit_match(answer, "321", {}) == score


@given(answer=DIGITS, rest=DIGITS, reference=DIGITS.filter(bool))
def test_characters_beyond_the_reference_gain_nothing(answer: str, rest: str, reference: str) -> None:
    full = answer[: len(reference)].ljust(len(reference), "x")
    assert digit_match(full + rest, reference, {}) == digit_match(full, reference, {}) <= 1.0


def test_digit_match_refuses_an_empty_reference() -> None:
    with pytest.raises(ValueError, match="reference"):
        digit_match("1", " ", {})
