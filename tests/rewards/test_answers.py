"""Final answers, and the majority among several."""

import time

import pytest

from slipstream.rewards.answers import boxed, final_answer, majority


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} or rather \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{12} and cut off \boxed{13", "12"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{1 + \boxed{2}}", "2"),
        ("#### 1\n#### 2\nso it is", "2"),
        ("#### \n", "####"),
        ("3 + 4 = 7\n#### 7", "7"),
        (" 42 \n", "42"),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_repeated_box_takes_linear_time() -> None:
    began = time.process_time()
    assert boxed(r"\boxed{" * 50_000) == ""
    assert time.process_time() - began < 5


def test_majority_is_of_final_answers() -> None:
    answers = ["#### 1", r"long way \boxed{ a+2 }", "#### 3", "short #### a + 2"]
    assert majority(answers) == 1


def test_first_wins_a_tie() -> None:
    assert majority(["b", "a", "a", "b"]) == 0
