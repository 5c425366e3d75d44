"""Weighted mixtures of envs."""

from collections import Counter
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import EnvConfig
from slipstream.env.base import Action, Env, Turn, has_sessions, offers_tools
from slipstream.env.builtin import mix
from slipstream.env.registry import build_env


def digits(operation: str, *, train: int, held_out: int, **more: Any) -> dict[str, Any]:
    """A part of a mixture with that many tasks; they are of one digit, or two."""
    length = len(str(train + held_out)) - 1
    assert 10**length == train + held_out
    return {
        "name": "digits", "label": operation,
        "options": {"operation": operation, "length": length, "eval_tasks": held_out},
    } | more  # fmt: skip


def mixed(*parts: dict[str, Any]) -> Env:
    return build_env(EnvConfig(name="mix", options={"envs": list(parts)}))


def tasks(env: Env, split: Any) -> list[tuple[str, str]]:
    found = [env.task(split, index) for index in range(env.size(split))]
    return [(str(task.info["env"]), str(task.prompt)) for task in found]


def test_an_epoch_has_every_task_by_the_weights() -> None:
    env = mixed(
        digits("copy", train=9, held_out=1, weight=3),
        digits("reverse", train=90, held_out=10, weight=1),
        digits("sort", train=9, held_out=1, weight=0),
    )
    train = tasks(env, "train")
    assert Counter(label for label, _ in train) == {"copy": 270, "reverse": 90}
    drawn = Counter(train)
    assert len(drawn) == 99
    assert {count for (label, _), count in drawn.items() if label == "copy"} == {30}
    assert tasks(env, "train") == train


def test_held_out_tasks_come_in_turn() -> None:
    env = mixed(*(digits(op, train=10 - n, held_out=n) for op, n in (("copy", 1), ("reverse", 4), ("sort", 2))))
    held_out = tasks(env, "eval")
    assert "".join(label[0] for label, _ in held_out) == "crsrsrr"
    assert len(set(held_out)) == 7


def test_fingerprint_depends_on_parts_and_weights() -> None:
    copy, reverse = (digits(operation, train=9, held_out=1) for operation in ("copy", "reverse"))
    envs = [
        mixed(copy, reverse),
        mixed(reverse, copy),
        mixed(copy, {**reverse, "weight": 2}),
        mixed(copy, {**reverse, "label": "r"}),
        mixed(copy, digits("reverse", train=8, held_out=2)),
    ]
    assert len({env.fingerprint() for env in envs}) == len(envs)
    assert mixed(copy, reverse).fingerprint() == envs[0].fingerprint()


def test_long_epoch_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "_MOST_TRAIN_TASKS", 100)
    env = mixed(digits("copy", train=99, held_out=1), digits("reverse", train=9, held_out=1, weight=1e-9))
    assert Counter(label for label, _ in tasks(env, "train")) == {"copy": 100, "reverse": 1}


async def test_parts_with_and_without_sessions_mix() -> None:
    env = mixed(
        digits("copy", train=9, held_out=1),
        digits(
            "add",
            train=90,
            held_out=10,
            tools=[{"name": "calculator"}],
            options={"operation": "add", "length": 1, "eval_tasks": 10},
        ),
    )
    assert has_sessions(env)
    assert offers_tools(env)
    sessions = {str(task.info["env"]): env.session(task) for task in (env.task("train", 0), env.task("train", 90))}
    assert await sessions["copy"].reset() == env.task("train", 0).prompt
    assert await sessions["copy"].step(Action("1", [1])) == Turn(done=True)
    assert not isinstance(await sessions["add"].reset(), str)  # an Observation, with the tool's schema
    for session in sessions.values():
        await session.close()
    assert not has_sessions(mixed(digits("copy", train=9, held_out=1)))


@pytest.mark.parametrize(
    ("parts", "part"),
    [
        ([{"name": "digts"}], "'digits'"),
        ([{"name": "digits", "wieght": 2}], "wieght"),
        ([{"name": "digits", "weight": -1}], "weight"),
        ([digits("copy", train=9, held_out=1)] * 2, "label copy"),
        ([digits("copy", train=9, held_out=1, weight=0)], "weight above 0"),
        ([], "weight above 0"),
        ([{"name": "tests.env.builtin.test_mix:HeldOut", "weight": 1}], "test_mix:HeldOut: no train tasks"),
    ],
)
def test_unusable_mixture_is_refused(parts: list[dict[str, Any]], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        mixed(*parts)


class HeldOut:
    """An env without train tasks."""

    def size(self, split: str) -> int:
        return int(split == "eval")

    def task(self, split: str, index: int) -> None:
        raise AssertionError("has no train task")

    def fingerprint(self) -> str:
        return "held out"


@pytest.mark.parametrize("index", [-1, 18])
def test_index_outside_split_is_refused(index: int) -> None:
    env = mixed(digits("copy", train=9, held_out=1), digits("sort", train=9, held_out=1))
    with pytest.raises(IndexError):
        env.task("train", index)
