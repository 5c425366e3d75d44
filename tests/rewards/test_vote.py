"""The majority among several answers."""

import pytest

from slipstream.rewards.vote import final_answer, majority


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} or rather \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"cut off \boxed{12", "12"),
        ("3 + 4 = 7\n#### 7", "7"),
        (" 42 \n", "42"),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_majority_is_of_final_answers() -> None:
    answers = ["#### 1", "long way #### 2", "#### 3", "short #### 2"]
    assert majority(answers) == 1


def test_first_wins_a_tie() -> None:
    assert majority(["b", "a", "a", "b"]) == 0
