"""The penalty for long answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rewards.functions.overlong import overlong


def of(tokens: int, *, truncated: bool = False, penalty: float = 1.0) -> float:
    return overlong(tokens, truncated=truncated, max_tokens=20, cache_tokens=8, penalty=penalty)


@pytest.mark.parametrize(
    ("tokens", "added"), [(0, 0.0), (12, 0.0), (13, -0.125), (16, -0.5), (19, -0.875), (20, -1.0), (21, -1.0)]
)
def test_the_penalty_grows_linearly_over_the_cache(tokens: int, added: float) -> None:
    assert of(tokens) == added


def test_a_truncated_answer_gets_the_whole_penalty() -> None:
    assert of(3, truncated=True) == of(20, truncated=True) == -1.0


@given(tokens=st.integers(0, 25), truncated=st.booleans(), penalty=st.floats(0.01, 10))
def test_the_result_is_proportional_to_the_penalty(tokens: int, truncated: bool, penalty: float) -> None:
    assert of(tokens, truncated=truncated, penalty=penalty) == penalty * of(tokens, truncated=truncated)
