"""An env of single-turn tasks in which the policy may call tools before it answers."""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from slipstream.configs.runtime.errors import format_error
from slipstream.configs.runtime.tracing import span
from slipstream.configs.schema.run import ToolConfig
from slipstream.env.base import Action, Env, Message, Observation, Split, Task, ToolCall, Turn
from slipstream.env.tools.schema import Tool, Toolbox, ToolError, ToolUnavailable

MOST_CALLS: Final = 32
"""Calls in one answer that are run; the others get an error as their result."""

CALLS, ERRORS, TIMEOUTS = "tool_calls", "tool_errors", "tool_timeouts"
"""Metrics of a turn. There is `tool_calls/<name>` for each tool too."""


@dataclass(frozen=True)
class LimitedTool:
    """A tool with the limits of one call."""

    tool: Tool
    deadline_s: float
    max_output_characters: int


@dataclass(frozen=True)
class LimitedToolbox:
    """A toolbox with the limits of each call of its tools."""

    toolbox: Toolbox
    config: ToolConfig

    async def open(self, episode: AsyncExitStack) -> list[LimitedTool]:
        """Its tools for one episode."""
        return self._limited(await self.toolbox.open(episode))

    @property
    def tools(self) -> list[LimitedTool]:
        """Its tools, to be described and not called."""
        return self._limited(self.toolbox.tools)

    def _limited(self, tools: Sequence[Tool]) -> list[LimitedTool]:
        return [LimitedTool(tool, self.config.deadline_s, self.config.max_output_characters) for tool in tools]


class ToolEnv:
    """Tasks of `env`, whose episodes end with the first answer without a call."""

    offers_tools = True

    def __init__(self, env: Env, toolboxes: Sequence[LimitedToolbox]) -> None:
        """No two tools may have the same name."""
        self._env = env
        self._toolboxes = toolboxes
        self._schemas = [limited.tool.schema for toolbox in toolboxes for limited in toolbox.tools]

    def size(self, split: Split) -> int:
        """Number of tasks in the split."""
        return self._env.size(split)

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`."""
        return self._env.task(split, index)

    def fingerprint(self) -> str:
        """Hash of the env's fingerprint, of the tools' schemas, which are part of the prompts, and of their data."""
        data = [each.toolbox.fingerprint for each in self._toolboxes]
        described = json.dumps([self._env.fingerprint(), self._schemas, data], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()

    def opening(self, task: Task) -> Observation:
        """The prompt as chat messages, and the tools' schemas."""
        prompt = task.prompt
        return Observation([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, self._schemas)

    def session(self, task: Task) -> "ToolSession":
        """An episode of the task."""
        return ToolSession(self.opening(task), self._toolboxes)


class ToolSession:
    """Runs the calls of each action in parallel; their results are the observation."""

    def __init__(self, opening: Observation, toolboxes: Sequence[LimitedToolbox]) -> None:
        self.resumable = all(getattr(each.toolbox, "resumable", False) for each in toolboxes)
        self._opening = opening
        self._toolboxes = toolboxes
        self._held = AsyncExitStack()
        self._tools: dict[str, LimitedTool] = {}

    async def reset(self) -> Observation:
        """The opening, once the tools are ready. Raises: ToolUnavailable."""
        for toolbox in self._toolboxes:
            self._tools |= {limited.tool.name: limited for limited in await toolbox.open(self._held)}
        return self._opening

    async def step(self, action: Action) -> Turn:
        """The results of the action's calls; without any the episode ends. Raises: ToolUnavailable."""
        calls = action.tool_calls if action.finish_reason == "stop" else ()
        results, metrics = await run_calls(calls, self._tools)
        return Turn(results, done=not calls, metrics=metrics)

    async def close(self) -> None:
        """Frees what the tools hold for this episode."""
        await self._held.aclose()


async def run_calls(
    calls: Sequence[ToolCall], tools: Mapping[str, LimitedTool]
) -> tuple[list[Message], dict[str, float]]:
    """Runs calls in parallel; returns a message of role `tool` for each, in order, and the metrics.

    A bad call, an unknown name, a tool that raises or exceeds its deadline: the message has the error.

    Raises: ToolUnavailable.
    """
    metrics = dict.fromkeys([CALLS, ERRORS, TIMEOUTS, *(f"{CALLS}/{name}" for name in tools)], 0.0)
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(_run(call, tools, metrics)) for call in calls[:MOST_CALLS]]
    except ExceptionGroup as errors:  # only ToolUnavailable leaves a task
        raise errors.exceptions[0] from None
    results = [task.result() for task in running]
    for _ in calls[MOST_CALLS:]:
        metrics[CALLS] += 1
        metrics[ERRORS] += 1
        results.append(f"error: only {MOST_CALLS} calls are run at once")
    messages: list[Message] = [
        {"role": "tool", "tool_call_id": call.id, "name": call.name or "unknown", "content": result}
        for call, result in zip(calls, results, strict=True)
    ]
    return messages, metrics


async def _run(call: ToolCall, tools: Mapping[str, LimitedTool], metrics: dict[str, float]) -> str:
    """The result of a call, or its error. Raises: ToolUnavailable."""
    metrics[CALLS] += 1
    limited, error = tools.get(call.name), call.error
    if limited is not None:
        metrics[f"{CALLS}/{call.name}"] += 1
    if not error and limited is None:
        error = f"there is no tool {call.name[:100]!r}; the tools are {', '.join(tools)}"
    if error or limited is None:
        metrics[ERRORS] += 1
        return f"error: {error}"
    deadline = asyncio.timeout(limited.deadline_s)
    try:
        with span("tool", tool=call.name):
            async with deadline:
                return limited_text(await limited.tool.call(call.arguments), limited.max_output_characters)
    except ToolUnavailable:
        raise
    # A tool may raise anything, and a SystemExit would end the sessions' event loop; the metrics count each.
    except BaseException as failure:
        task = asyncio.current_task()
        if isinstance(failure, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        if deadline.expired():
            metrics[TIMEOUTS] += 1
            return f"error: no result within {limited.deadline_s:g} s"
        metrics[ERRORS] += 1
        message = str(failure) if isinstance(failure, ToolError) else format_error(failure)
        return f"error: {limited_text(message, limited.max_output_characters)}"


def limited_text(text: str, most: int) -> str:
    """The text, or its first and last characters, `most` together, with a mark between that counts the others.

    Halves of surrogate pairs, which no tokenizer takes, become question marks.
    """
    text = text.encode(errors="replace").decode()
    if len(text) <= most:
        return text
    tail = most // 2
    return f"{text[: most - tail]}\n[... {len(text) - most} characters cut ...]\n{text[len(text) - tail :]}"
