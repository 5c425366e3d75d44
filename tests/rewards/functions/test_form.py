"""Rewards for the form of an answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.functions.text import Format, Length, Repetition
from slipstream.rewards.registry import find_reward
from tests.rewards.episodes import episode


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0),
        ("say <think></think> and <answer></answer>.", 1.0),
        ("<answer>4</answer><think>a</think>", 0.0),
        ("<think>a<answer>4</think></answer>", 0.0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4", 0.0),
        ("", 0.0),
    ],
)
def test_each_tag_occurs_once_and_in_order(answer: str, value: float) -> None:
    assert Format(tags=("think", "answer"))(answer, "", {}) == value


@pytest.mark.parametrize(("answer", "value"), [(" ab\nc \n", 1.0), ("abx", 0.0), ("xab", 0.0)])
def test_the_pattern_matches_the_whole_answer(answer: str, value: float) -> None:
    assert Format(pattern="ab(.c)?")(answer, "", {}) == value


@pytest.mark.parametrize(
    ("length", "value"),
    [(1, 0.0), (2, 1 / 3), (3, 2 / 3), (4, 1.0), (6, 1.0), (7, 2 / 3), (8, 1 / 3), (9, 0.0), (20, 0.0)],
)
def test_length_outside_its_range_loses_linearly(length: int, value: float) -> None:
    reward = Length(least=4, most=6, margin=2)
    score = reward(episode("x" * length))
    assert score.value == pytest.approx(value)
    assert score.parts == {"length": length}


def test_length_has_units() -> None:
    subject = episode("two words")
    assert Length(most=2, unit="words")(subject).parts["length"] == 2
    assert Length(most=2, unit="characters")(subject).parts["length"] == 9


@pytest.mark.parametrize(
    ("answer", "allowed", "value"),
    [
        ("a b c d", 0.0, 0.0), ("a b", 0.0, 0.0), ("", 0.0, 0.0), ("a b A b a", 0.0, -1 / 2), ("a b a b a", 0.5, 0.0),
        ("a a a a a", 0.5, -1 / 2),
    ],
)  # fmt: skip
def test_repeated_grams_are_penalised_beyond_their_allowed_share(answer: str, allowed: float, value: float) -> None:
    assert Repetition(n=2, allowed=allowed)(answer, "", {}) == pytest.approx(value)


@given(answer=st.text("ab ", max_size=40), n=st.integers(1, 4), allowed=st.floats(0, 0.9))
def test_repetition_is_at_most_1(answer: str, n: int, allowed: float) -> None:
    assert -1 <= Repetition(n=n, allowed=allowed)(answer, "", {}) <= 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("format", {}), ("format", {"pattern": "("}), ("length", {}), ("length", {"most": 2, "least": 3}),
        ("length", {"most": 2, "unit": "lines"}), ("repetition", {"n": 0}), ("repetition", {"size": 3}),
    ],
)  # fmt: skip
def test_unusable_options_are_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=name):
        find_reward(RewardConfig(name=name, options=options))
