"""Answers of mathematics: where they are found, when they are equal, and expressions without an end."""

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import RewardUnavailable
from slipstream.rewards.functions import math
from slipstream.rewards.functions.math import Extract, Math
from slipstream.rewards.registry import find_reward
from tests.rewards.functions.benchmarks import rows

ENDLESS = r"\boxed{2^{2^{2^{2^{2^2}}}}}"
TABLE = Path(__file__).parent / "math_answers.md"
ROW = re.compile(r"^\| `(.+)` \| `(.+)` \| ([01]) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def reward() -> Iterator[Math]:
    yield Math(timeout_s=20)


def value(reward: Math, answer: str, reference: str) -> float | str:
    """The score; `unparsed` or `timeout` if the answer could not be compared."""
    score = reward(answer, reference, {})
    if score.parts == {"parsed": 1.0, "timeout": 0.0}:
        return score.value
    assert score.value == 0.0
    return "timeout" if score.parts["timeout"] else "unparsed"


def comparing(reward: Math) -> psutil.Process:
    assert reward._comparer._process is not None
    return psutil.Process(reward._comparer._process.pid)


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("18", "18", 1.0),
        ("The answer is 18.", "16 - 3 = 13, ...\n#### 18", 1.0),
        (r"We get \boxed{1,234}", "#### 1234", 1.0),
        (r"We get \boxed{\$1{,}234.00}", "1234", 1.0),
        (r"\boxed{3}, no, \boxed{4}", "4", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\dfrac12}", r"so $\boxed{\frac{1}{2}}$", 1.0),
        (r"so $x = \frac{\sqrt{2}}{2}$", r"$\frac{1}{\sqrt 2}$", 1.0),
        (r"\boxed{(3, \pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        ("19", "18", 0.0),
        ("1800", "18", 0.0),
        (r"\boxed{(1, 2)}", "(2, 1)", 0.0),
        (r"18 or rather \boxed{19}", "18", 0.0),
        ("no idea", "18", "unparsed"),
        ("", "18", "unparsed"),
        (r"\boxed{}", "18", "unparsed"),
    ],
)
def test_answers_are_compared_as_numbers_or_expressions(
    reward: Math, answer: str, reference: str, expected: float | str
) -> None:
    assert value(reward, answer, reference) == expected


@pytest.mark.parametrize(
    ("extract", "answer", "expected"),
    [
        ("boxed", r"\boxed{18}", 1.0),
        ("boxed", "18", "unparsed"),
        ("boxed", r"\boxed{18", "unparsed"),
        ("hashes", "so\n#### 18\n", 1.0),
        ("hashes", r"\boxed{18}", "unparsed"),
        ("latex", "so $18$", 1.0),
        ("latex", "so 18", "unparsed"),
        ("number", "first 17, then 18 apples", 1.0),
        ("number", "none", "unparsed"),
        ("plain", " 18.0\n", 1.0),
        ("plain", r"x = 18", 1.0),
    ],
)
def test_option_says_where_the_answer_is(extract: Extract, answer: str, expected: float | str) -> None:
    assert value(Math(extract=extract, timeout_s=20), answer, "18") == expected


@pytest.mark.parametrize(
    "answer",
    [
        "To calculate 44 - 6, we", r"\boxed{44 - 6}", r"\boxed{19 \cdot 2}", "76/2", r"$x = \frac{76}{2}$",
        r"\boxed{\sqrt{1444}}", r"\boxed{6^2 + 2}", r"\boxed{\begin{pmatrix}38\end{pmatrix}}",
    ],
)  # fmt: skip
def test_expression_of_a_numbers_value_is_no_answer(reward: Math, answer: str) -> None:
    assert value(reward, answer, "38") == 0.0


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (r"\boxed{44 - 6 = 38}", "38"), (r"\boxed{38 \text{ cm}}", "38"), (r"\boxed{-38^\circ}", "-38"),
        (r"\boxed{3.8 \times 10^{1}}", "38"), (r"\boxed{38\%}", "0.38"), (r"\boxed{\frac{19}{50}}", "0.38"),
        (r"$\boxed{\{38\}}$", "38"), (r"\boxed{x = -10}", "-10"),
    ],
)  # fmt: skip
def test_written_numbers_are_answers(reward: Math, answer: str, reference: str) -> None:
    assert value(reward, answer, reference) == 1.0


@pytest.mark.parametrize("reference", ["", r"\boxed{", "{"])
def test_reference_that_can_not_be_parsed_is_an_error(reward: Math, reference: str) -> None:
    with pytest.raises(ValueError, match="reference"):
        reward(r"\boxed{x+1}", reference, {})


def test_endless_comparison_is_a_timeout_and_the_next_is_compared() -> None:
    reward = Math(timeout_s=0.5)
    assert value(reward, ENDLESS, r"\frac{7}{2}") == "timeout"
    assert value(reward, r"\boxed{x = 7}", "7/1") == 1.0


def test_hard_answers_of_a_group_are_timeouts() -> None:
    reward = Math(timeout_s=0.2)
    integrals = [rf"\boxed{{\int_0^{n} \frac{{\sin(x^{n})}}{{\sqrt{{1 + x^{{{n + 1}}}}}}} dx}}" for n in range(2, 10)]
    assert [value(reward, each, r"\frac{\pi}{7}") for each in integrals] == ["timeout"] * 8


def test_stopped_process_is_no_timeout(reward: Math, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that is too busy: the answer is compared again."""
    assert value(reward, r"\boxed{y+6}", "6+y") == 1.0
    process = comparing(reward)
    process.suspend()
    monkeypatch.setattr(math, "wall_limit_s", lambda timeout_s: 0.2)
    with pytest.raises(RewardUnavailable):
        reward(r"\boxed{y+7}", "7+y", {})
    monkeypatch.undo()
    assert psutil.wait_procs([process], 30)[1] == []
    assert value(reward, r"\boxed{y+7}", "7+y") == 1.0


def test_timeout_is_not_remembered() -> None:
    comparer = math.Comparer(0.2)
    assert comparer.compare(r"\frac{7}{2}", "2^{2^{2^{2^{2^2}}}}", "marked") == "timeout"
    assert comparer._verdicts == {}


def test_killed_process_is_replaced(reward: Math) -> None:
    assert value(reward, r"\boxed{z+8}", "8+z") == 1.0
    process = comparing(reward)
    process.send_signal(signal.SIGKILL)
    assert value(reward, r"\boxed{z+9}", "9+z") == 1.0
    assert comparing(reward) != process


def test_reference_that_takes_too_long_is_no_bad_reference() -> None:
    reward, hard = Math(timeout_s=0.001), r"\frac{\sqrt{x^2 + 1}}{\sin(x) + 2}"
    with pytest.raises(RewardUnavailable, match="timeout_s"):
        reward(r"\boxed{x + 1}", hard, {})
    assert reward._comparer._verdicts == {}


@pytest.mark.parametrize(("answer", "reference", "score"), ROW.findall(TABLE.read_text(encoding="utf-8")))
def test_table_of_answers(reward: Math, answer: str, reference: str, score: str) -> None:
    assert reward(answer.replace(r"\|", "|"), reference, {}).value == float(score)


@pytest.mark.parametrize(
    "answer",
    [
        "#### " + "cm " * 160 + "5!", "#### " + r"\ab1" * 120 + ", = 5", "answer is " * 9000,
        r"\text{" * 80 + "5x" + "}" * 80,
    ],
)  # fmt: skip
def test_degenerate_answers_are_read_in_linear_time(answer: str) -> None:
    began = time.process_time()
    for reference in ("5", r"\text{yes}", "x+1"):
        assert math.compare_texts(reference, *math.extract(answer, "auto")) != "equal"
    assert time.process_time() - began < 2


def test_without_its_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"slipstream\[math\]"):
        find_reward(RewardConfig(name="math"))


@pytest.mark.parametrize("form", [r"So \boxed{%s}.", "The answer is %s.", "so\n#### %s dollars", "**%s**<|im_end|>"])
def test_gsm8k_is_scored_by_its_references(reward: Math, form: str) -> None:
    solutions = [row["answer"] for row in rows("gsm8k/gold_bpb_5shot")]
    answers = [solution.rpartition("####")[2].strip() for solution in solutions]
    shuffled = [*answers[1:], answers[0]]
    began = time.process_time()
    right = [reward(form % answer, text, {}).value for answer, text in zip(answers, solutions, strict=True)]
    wrong = [reward(form % answer, text, {}).value for answer, text in zip(shuffled, solutions, strict=True)]
    assert time.process_time() - began < 2 * len(solutions) / 1000, "2,000 answers a second on two cores"
    assert right == [1.0] * 1319
    assert wrong == [float(answer == other) for answer, other in zip(shuffled, answers, strict=True)]
    assert sum(wrong) == 15  # equal by chance


def test_math_500_is_scored_by_its_references(reward: Math, monkeypatch: pytest.MonkeyPatch) -> None:
    solutions = [row["solution"] for row in rows("minerva_math_500/gold_bpb_0shot")]
    shuffled = [*solutions[1:], solutions[0]]
    assert sum(reward(solution, solution, {}).value for solution in solutions) == 500
    assert sum(reward(other, text, {}).value for other, text in zip(shuffled, solutions, strict=True)) == 3  # by chance
    monkeypatch.setattr(math, "compare_texts", lambda wanted, given, form: None)  # all by math-verify
    assert sum(reward(solution, solution, {}).value for solution in solutions) >= 0.99 * 500
