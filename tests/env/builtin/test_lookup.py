"""Tasks whose answer only the tool gives: tables, calls, rewards."""

import pytest

from slipstream.env.base import Action, Turn
from slipstream.env.builtin.lookup import Lookup, LookupSession


def action(text: str, finish_reason: str = "stop") -> Action:
    return Action(text, (), finish_reason=finish_reason)


async def opened(env: Lookup, index: int = 0) -> LookupSession:
    session = env.session(env.task("train", index))
    assert await session.reset() == f"{key_of(env, index)}="
    return session


def key_of(env: Lookup, index: int = 0) -> str:
    return str(env.task("train", index).info["key"])


async def test_call_returns_the_value_and_the_answer_ends() -> None:
    env = Lookup(digits=2)
    for index in range(5):
        session, task = await opened(env, index), env.task("train", index)
        turn = await session.step(action(f"c{task.info['key']}"))
        assert turn.observation == f"{task.reference}="
        assert (turn.done, turn.reward, turn.metrics["tool_calls/lookup"]) == (False, 1.0, 1)
        turn = await session.step(action(task.reference))
        assert (turn.done, turn.reward, turn.metrics["tool_calls"]) == (True, 0.0, 0)
        await session.close()


def test_answers_can_not_be_learned_from_the_prompt() -> None:
    env = Lookup()
    values: dict[str, list[str]] = {}
    for index in range(2000):
        task = env.task("train", index)
        values.setdefault(str(task.prompt), []).append(task.reference)
    assert len(values) == 10
    for found in values.values():
        most = max(found.count(value) for value in set(found))
        assert most / len(found) < 0.2


@pytest.mark.parametrize("text", ["c", "cx", "c77", "c+"])
async def test_call_without_a_key_is_an_error_in_the_vocabulary(text: str) -> None:
    turn = await (await opened(Lookup())).step(action(text))
    assert (turn.observation, turn.done, turn.metrics["tool_errors"]) == ("E=", False, 1)


async def test_other_keys_have_other_values() -> None:
    env = Lookup(digits=8)
    other = (int(key_of(env)) + 1) % 10
    turn = await (await opened(env)).step(action(f"c{other}"))
    assert turn.observation not in ("E=", f"{env.task('train', 0).reference}=")


async def test_parts_of_a_call_earn_parts_of_the_reward() -> None:
    env = Lookup(call_reward=4.0)
    key = key_of(env)
    wrong = str((int(key) + 1) % 10)

    async def earned(text: str, finish_reason: str = "stop") -> Turn:
        return await (await opened(env)).step(action(text, finish_reason))

    rewards = {
        text: (await earned(text)).reward for text in ("", "A", "c", f"c{wrong}", f"c{key}", f"c{key}A", f"A{key}")
    }
    assert list(rewards.values()) == [0, 0, 1, 3, 4, 3, 3]
    cut_off = await earned(f"c{key}", "length")
    assert (cut_off.reward, cut_off.done) == (3, True)


async def test_only_the_first_action_can_call() -> None:
    session = await opened(Lookup())
    assert not (await session.step(action("c1"))).done
    turn = await session.step(action("c2"))
    assert (turn.done, turn.reward) == (True, 0.0)
