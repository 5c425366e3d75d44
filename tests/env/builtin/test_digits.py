"""Digit problems: correct references, each problem once, eval held out."""

import re
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from slipstream.env.base import Split
from slipstream.env.builtin.digits import Digits, Operation, permuted

ANSWERS: dict[str, Callable[[str], str]] = {
    "c": lambda digits: digits,
    "r": lambda digits: digits[::-1],
    "s": lambda digits: "".join(sorted(digits)),
}
SPLITS: tuple[Split, ...] = ("train", "eval")
OPERATIONS: tuple[Operation, ...] = ("copy", "reverse", "sort", "add")


@given(
    operation=st.sampled_from(OPERATIONS),
    length=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    split=st.sampled_from(["train", "eval"]),
    data=st.data(),
)
def test_every_reference_answers_its_prompt(
    operation: Operation, length: int, seed: int, split: Split, data: st.DataObject
) -> None:
    env = Digits(operation, length=length, eval_tasks=5, seed=seed)
    task = env.task(split, data.draw(st.integers(0, env.size(split) - 1)))
    assert isinstance(task.prompt, str)
    if operation == "add":
        match = re.fullmatch(rf"(\d{{{length}}})\+(\d{{{length}}})=", task.prompt)
        assert match
        assert len(task.reference) == length + 1
        assert int(task.reference) == int(match[1]) + int(match[2])
    else:
        digits, letter = task.prompt[:-1], task.prompt[-1]
        assert letter == operation[0]
        assert len(digits) == length
        assert task.reference == ANSWERS[letter](digits)


@given(operation=st.sampled_from(OPERATIONS), seed=st.integers(0, 2**32), data=st.data())
def test_train_and_eval_hold_every_problem_once(operation: Operation, seed: int, data: st.DataObject) -> None:
    length, space = (1, 100) if operation == "add" else (2, 100)
    eval_tasks = data.draw(st.integers(0, space - 1))
    env = Digits(operation, length=length, eval_tasks=eval_tasks, seed=seed)
    prompts = {split: [str(env.task(split, index).prompt) for index in range(env.size(split))] for split in SPLITS}
    assert [len(prompts[split]) for split in SPLITS] == [space - eval_tasks, eval_tasks]
    assert len({*prompts["train"], *prompts["eval"]}) == space


@given(digits=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_the_permutation_is_a_bijection(digits: int, seed: int) -> None:
    assert sorted(permuted(i, digits=digits, seed=seed) for i in range(10**digits)) == list(range(10**digits))


def test_the_permutation_is_fixed_between_releases() -> None:
    """A run that resumes with a later release must not train on its held-out problems."""
    assert [permuted(i, digits=3, seed=0) for i in range(5)] == [18, 381, 787, 151, 265]
    assert [permuted(i, digits=8, seed=7) for i in range(3)] == [95969802, 5993599, 87801827]


def test_held_out_problems_are_spread_over_the_space() -> None:
    env = Digits("copy", length=3, eval_tasks=256)
    held_out = [str(env.task("eval", index).prompt) for index in range(256)]
    for place in range(3):
        counts = [sum(prompt[place] == digit for prompt in held_out) for digit in "0123456789"]
        assert 8 <= min(counts) <= max(counts) <= 50, f"digits at place {place}: {counts}"


def test_another_seed_holds_out_other_problems() -> None:
    first, second = ({Digits("copy", seed=n).task("eval", index).reference for index in range(256)} for n in (0, 1))
    assert len(first & second) < 128
