"""Final answers, and the majority among several."""

import pytest

from slipstream.rewards.answers import final_answer, majority


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} or rather \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{12} and cut off \boxed{13", "12"),
        ("#### 1\n#### 2\nso it is", "2"),
        ("#### \n", "####"),
        ("3 + 4 = 7\n#### 7", "7"),
        (" 42 \n", "42"),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_majority_is_of_final_answers() -> None:
    answers = ["#### 1", r"long way \boxed{ a+2 }", "#### 3", "short #### a + 2"]
    assert majority(answers) == 1


def test_first_wins_a_tie() -> None:
    assert majority(["b", "a", "a", "b"]) == 0
