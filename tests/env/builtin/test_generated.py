"""Envs that generate their tasks: options, indices, and what the tasks depend on."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.base import Env
from slipstream.env.builtin.colours import Colours
from slipstream.env.builtin.digits import Digits
from slipstream.env.builtin.lookup import Lookup

Make = Callable[..., Env]
copy: Make = partial(Digits, "copy")


@pytest.mark.parametrize(
    ("make", "options", "part"),
    [
        (Digits, {"operation": "multiply"}, "operation='multiply'"),
        (Digits, {"operation": "copy", "length": 0}, "length=0 must"),
        (Digits, {"operation": "add", "length": 5}, "from 1 to 4 for add"),
        (Digits, {"operation": "copy", "length": "3"}, "length='3' must"),
        (Digits, {"operation": "copy", "length": 2, "eval_tasks": 100}, "eval_tasks=100 must be from 0 to 99"),
        (Digits, {"operation": "copy", "eval_tasks": -1}, "eval_tasks=-1 must be from 0"),
        (Colours, {"images": 0}, "images="),
        (Colours, {"images": 9}, "images="),
        (Colours, {"train_tasks": 0}, "train_tasks="),
        (Colours, {"eval_tasks": -1}, "eval_tasks="),
        (Lookup, {"digits": 0}, "digits"),
        (Lookup, {"digits": 17}, "digits"),
        (Lookup, {"train_tasks": -1}, "train_tasks"),
        (Lookup, {"eval_tasks": 1.5}, "eval_tasks"),
    ],
)
def test_option_out_of_range_is_refused(make: Make, options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(part)):
        make(**options)


@pytest.mark.parametrize("make", [copy, Colours, Lookup])
def test_index_outside_the_split_is_refused(make: Make) -> None:
    env = make(eval_tasks=3)
    for index in (-1, 3):
        with pytest.raises(IndexError):
            env.task("eval", index)


@pytest.mark.parametrize(
    ("make", "others"),
    [
        (copy, [partial(Digits, "sort"), partial(copy, length=4), partial(copy, eval_tasks=8), partial(copy, seed=1)]),
        (Colours, [partial(Colours, seed=1)]),
        (Lookup, [partial(Lookup, seed=1), partial(Lookup, digits=2), partial(Lookup, eval_tasks=3),
                  partial(Lookup, call_reward=0.5)]),
    ],
)  # fmt: skip
def test_tasks_depend_on_options_alone(make: Make, others: list[Make]) -> None:
    env, same = make(), make()
    assert env.task("eval", 3) == same.task("eval", 3) != env.task("train", 3)
    assert env.fingerprint() == same.fingerprint()
    assert len({env.fingerprint(), *(other().fingerprint() for other in others)}) == 1 + len(others)


def test_default_sizes() -> None:
    assert (Colours().size("train"), Colours().size("eval")) == (10_000, 256)
    assert copy().fingerprint() == Digits("copy", 3, 256, 0).fingerprint()
