"""Episodes with tools: results, errors, limits, metrics, and failures that are no observation."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from slipstream.configs.schema.run import ToolConfig
from slipstream.env.base import Action, Observation, Task, ToolCall, Turn
from slipstream.env.builtin.digits import Digits
from slipstream.env.tools.schema import SharedTools, Tool, ToolUnavailable
from slipstream.env.tools.session import MOST_CALLS, LimitedToolbox, ToolEnv

GIVEN = ToolConfig(name="given", deadline_s=5.0, max_output_characters=40)


async def echo(text: str) -> str:
    return text


async def fail(kind: str) -> str:
    raise {"value": ValueError("wrong value"), "exit": SystemExit(3), "late": TimeoutError("of its own")}[kind]


async def cancelled() -> str:
    raise asyncio.CancelledError


async def hang() -> str:
    return await asyncio.Future()


async def gone() -> str:
    raise ToolUnavailable("its server is gone")


def tool_env(*functions: Any, config: ToolConfig = GIVEN) -> ToolEnv:
    tools = SharedTools([Tool.from_function(function) for function in functions])
    return ToolEnv(Digits("reverse"), [LimitedToolbox(tools, config)])


def action(*calls: ToolCall, finish_reason: str = "stop") -> Action:
    return Action("text", (), tool_calls=calls, finish_reason=finish_reason)


def call(name: str, number: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(f"call_{number}", name, arguments)


async def turn_of(env: ToolEnv, *calls: ToolCall, finish_reason: str = "stop") -> Turn:
    session = env.session(env.task("train", 0))
    await session.reset()
    try:
        return await session.step(action(*calls, finish_reason=finish_reason))
    finally:
        await session.close()


def texts(turn: Turn) -> list[str]:
    assert not isinstance(turn.observation, str)
    return [message["content"] for message in turn.observation]


async def test_prompt_is_a_chat_with_the_schemas() -> None:
    env = tool_env(echo)
    task = env.task("train", 3)
    observed = await env.session(task).reset()
    assert observed == Observation([{"role": "user", "content": task.prompt}], [Tool.from_function(echo).schema])
    chat = Task(prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], reference="")
    assert (await env.session(chat).reset()).messages == chat.prompt


def test_tasks_are_those_of_the_env_and_schemas_its_fingerprint() -> None:
    env, plain = tool_env(echo), Digits("reverse")
    assert (env.size("eval"), env.task("eval", 1)) == (plain.size("eval"), plain.task("eval", 1))
    fingerprints = {plain.fingerprint(), env.fingerprint(), tool_env(echo, hang).fingerprint()}
    assert len(fingerprints) == 3
    assert env.fingerprint() == tool_env(echo).fingerprint()


async def test_results_come_in_the_order_of_the_calls() -> None:
    order: list[str] = []

    async def second() -> str:
        order.append("second")
        return "2"

    async def first() -> str:
        while not order:
            await asyncio.sleep(0)  # so it ends only if the other runs meanwhile
        return "1"

    turn = await turn_of(tool_env(first, second), call("first", 0), call("second", 1))
    assert turn.observation == [
        {"role": "tool", "tool_call_id": "call_0", "name": "first", "content": "1"},
        {"role": "tool", "tool_call_id": "call_1", "name": "second", "content": "2"},
    ]
    assert (turn.done, turn.reward) == (False, 0.0)
    counts = {"tool_calls": 2, "tool_errors": 0, "tool_timeouts": 0, "tool_calls/first": 1, "tool_calls/second": 1}
    assert turn.metrics == counts


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (call("ecko", 1, text="a"), "'ecko'"),
        (ToolCall("call_1", "", {}, error="not valid JSON"), "not valid JSON"),
        (call("echo", 1), "text"),
        (call("fail", 1, kind="value"), "ValueError: wrong value"),
        (call("fail", 1, kind="exit"), "SystemExit"),
        (call("fail", 1, kind="late"), "TimeoutError: of its own"),
        (call("cancelled", 1), "CancelledError"),
    ],
    ids=["unknown", "broken", "arguments", "raises", "exits", "own timeout", "own cancellation"],
)
async def test_failing_call_is_an_observation(bad: ToolCall, part: str) -> None:
    turn = await turn_of(tool_env(echo, fail, cancelled), call("echo", 0, text="a"), bad)
    good, error = texts(turn)
    assert good == "a"
    assert error.startswith("error: ")
    assert part in error
    assert not turn.done
    assert (turn.metrics["tool_calls"], turn.metrics["tool_errors"], turn.metrics["tool_timeouts"]) == (2, 1, 0)


async def test_late_call_is_a_timeout() -> None:
    config = GIVEN.model_copy(update={"deadline_s": 0.05})
    turn = await turn_of(tool_env(echo, hang, config=config), call("hang", 0), call("echo", 1, text="a"))
    late, good = texts(turn)
    assert "0.05 s" in late
    assert good == "a"
    assert (turn.metrics["tool_errors"], turn.metrics["tool_timeouts"]) == (0, 1)


async def test_long_results_keep_both_ends() -> None:
    (text,) = texts(await turn_of(tool_env(echo), call("echo", text="a" * 1000 + "z" * 1000)))
    assert text.startswith("a" * 20 + "\n")
    assert text.endswith("\n" + "z" * 20)
    assert "1960" in text
    (text,) = texts(await turn_of(tool_env(echo), call("echo", text="b" * 40)))
    assert text == "b" * 40
    (text,) = texts(await turn_of(tool_env(echo), call("echo", text="\ud800")))
    assert text == "?"


async def test_calls_beyond_the_most_are_not_run() -> None:
    turn = await turn_of(tool_env(echo), *(call("echo", number, text=str(number)) for number in range(MOST_CALLS + 2)))
    assert [text.startswith("error: ") for text in texts(turn)] == [False] * MOST_CALLS + [True] * 2
    assert (turn.metrics["tool_calls"], turn.metrics["tool_errors"]) == (MOST_CALLS + 2, 2)
    assert turn.metrics["tool_calls/echo"] == MOST_CALLS


async def test_answer_without_calls_or_cut_off_ends_the_episode() -> None:
    for turn in (
        await turn_of(tool_env(echo)),
        await turn_of(tool_env(echo), call("echo", text="a"), finish_reason="length"),
    ):
        assert turn.done
        assert turn.metrics == {"tool_calls": 0, "tool_errors": 0, "tool_timeouts": 0, "tool_calls/echo": 0}


async def test_unavailable_tool_costs_the_episode() -> None:
    with pytest.raises(ToolUnavailable):
        await turn_of(tool_env(gone, hang), call("gone", 0), call("hang", 1))


class Counter:
    """Tools with a state of the episode: how often they were called in it."""

    fingerprint = ""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.tools: Sequence[Tool] = [Tool.from_function(self._tool())]

    def _tool(self) -> Any:
        state = {"calls": 0}

        async def count() -> int:
            state["calls"] += 1
            return state["calls"]

        self.state = state
        return count

    async def open(self, episode: AsyncExitStack) -> Sequence[Tool]:
        tool, state = Tool.from_function(self._tool()), self.state
        episode.callback(lambda: self.freed.append(state["calls"]))
        return [tool]


async def test_tools_may_hold_state_of_an_episode() -> None:
    counter = Counter()
    env = ToolEnv(Digits("reverse"), [LimitedToolbox(counter, GIVEN)])
    for calls in (1, 2):
        session = env.session(env.task("train", 0))
        await session.reset()
        found = [texts(await session.step(action(call("count"))))[0] for _ in range(calls)]
        await session.close()
        assert [json.loads(text) for text in found] == list(range(1, calls + 1))
    assert counter.freed == [1, 2]
