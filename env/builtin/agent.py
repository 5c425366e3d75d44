"""Tasks that agents play: programs and functions that know an OpenAI client, and nothing of this project."""

import asyncio
import hashlib
import inspect
import json
import os
import secrets
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.processes import guarded_command
from slipstream.env.base import AgentEndpoint, Env, Split, Task

RunAgent = Callable[[Task, AgentEndpoint], Awaitable[float | None] | float | None]

KEPT_OUTPUT_BYTES: Final = 4096
"""End of what a command printed that is kept for its error."""
SHOWN_CHARACTERS: Final = 500
MARKER: Final = "SLIPSTREAM_AGENT"
"""Variable by which the processes of an agent are found when the server ends."""
OUTPUT_S: Final = 1.0
"""Time for the end of the output to arrive; a child that has left the program's process group may hold it open."""


class AgentFailed(Exception):
    """A command ended with a code that stands for no reward, or was killed."""


class AgentTasks:
    """The tasks of another env, each played by an agent.

    Attributes:
        from_outside: True without an agent to run.
        needs_reward: see `AgentEnv`.
        labels: of the parts, if the tasks are a mixture.
    """

    def __init__(self, tasks: Env, run: RunAgent | None, *, identity: Sequence[Any], needs_reward: bool) -> None:
        """`identity` tells agents with other options apart."""
        self._tasks = tasks
        self._run = run
        self._identity = identity
        self.from_outside = run is None
        self.needs_reward = needs_reward
        self.labels: Sequence[str] = getattr(tasks, "labels", ())

    def size(self, split: Split) -> int:
        """Number of tasks in the split."""
        return self._tasks.size(split)

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`."""
        return self._tasks.task(split, index)

    def fingerprint(self) -> str:
        """Hash of the tasks and the agent's options."""
        described = ["agent", 1, self._tasks.fingerprint(), *self._identity]
        return hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()

    async def run_agent(self, task: Task, endpoint: AgentEndpoint) -> float | None:
        """Plays one episode; see `AgentEnv`."""
        assert self._run is not None, "agents from outside are not run"
        result = self._run(task, endpoint)
        return await result if inspect.isawaitable(result) else result


class Command:
    """An agent that is a program.

    It finds its model in the environment (`OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL`, `ANTHROPIC_BASE_URL`,
    `ANTHROPIC_API_KEY`, `SLIPSTREAM_SESSION_URL`) and its task, as JSON, on the standard input.
    """

    def __init__(self, command: Sequence[str], *, concurrency: int, rewards: Mapping[int, float | None]) -> None:
        """`rewards` by exit code; any other code is a failure of the agent, which is no reward of 0."""
        self._command = command
        self._rewards = rewards
        self._running = asyncio.Semaphore(concurrency)

    async def __call__(
        self, task: Task, endpoint: AgentEndpoint, environment: Mapping[str, str] | None = None
    ) -> float | None:
        """Runs the program once, with further variables. Raises: AgentFailed; OSError when it can't be started."""
        async with self._running:
            # A pipe of our own: asyncio's would let `wait` return only when the program's children have closed it, too.
            reading, writing = os.pipe()
            output = _Tail()
            try:
                transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                    lambda: output, os.fdopen(reading, "rb")
                )
                process = await asyncio.create_subprocess_exec(
                    # A server that is killed can't end it.
                    *guarded_command(self._command, f"{MARKER}={secrets.token_hex(8)}"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=writing,
                    stderr=writing,
                    env=os.environ | _environment(endpoint) | dict(environment or {}),
                    start_new_session=True,
                )
            finally:
                os.close(writing)
            try:
                await _feed(process, task)
                code = await process.wait()
            finally:
                _kill(process.pid)  # its children too, which may outlive it
                await asyncio.wait([output.ended], timeout=OUTPUT_S)
                transport.close()
                await process.wait()
        if code not in self._rewards:
            shown = output.kept.decode(errors="replace").strip()[-SHOWN_CHARACTERS:]
            raise AgentFailed(f"{self._command[0]} ended with code {code}, which stands for no reward: {shown}")
        return self._rewards[code]


def _environment(endpoint: AgentEndpoint) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.session_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "SLIPSTREAM_SESSION_URL": endpoint.session_url,
    }


async def _feed(process: asyncio.subprocess.Process, task: Task) -> None:
    assert process.stdin is not None, "it is a pipe"
    shown = {name: value for name, value in asdict(task).items() if name != "images"}
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # a program need not read its task
            process.stdin.write(json.dumps(shown, default=str).encode())
            await process.stdin.drain()
    finally:
        process.stdin.close()


class _Tail(asyncio.Protocol):
    """The end of an output.

    Attributes:
        ended: done once nobody can write any more.
    """

    def __init__(self) -> None:
        self.kept = b""
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Keeps the last bytes."""
        self.kept = (self.kept + data)[-KEPT_OUTPUT_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of the pipe."""
        self.ended.set_result(None)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # nothing is left
        os.killpg(group, signal.SIGKILL)


def in_threads(function: Callable[[Task, AgentEndpoint], float | None], *, concurrency: int) -> RunAgent:
    """The agent of a function that blocks."""
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="agent")

    async def run(task: Task, endpoint: AgentEndpoint) -> float | None:
        return await asyncio.get_running_loop().run_in_executor(pool, function, task, endpoint)

    return run


def checked_command(env: str, command: Sequence[str]) -> list[str]:
    """The command of an env's agent. Raises: ConfigError."""
    if isinstance(command, str) or not command:
        raise ConfigError(f"env {env}: command={command!r} must be a list, such as [python, agent.py]")
    if shutil.which(str(command[0])) is None:
        raise ConfigError(f"env {env}: command={command!r}: there is no program {str(command[0])!r} on this host")
    return [*map(str, command)]


def rewards_by_code(given: Mapping[Any, Any] | None) -> dict[int, float | None]:
    """Rewards by exit code; without any, code 0 is the end of an agent without a reward. Raises: ConfigError."""
    if given is None:
        return {0: None}
    try:
        return {int(code): float(reward) for code, reward in given.items()}
    except (TypeError, ValueError):
        raise ConfigError(
            f"env agent: exit_rewards={given!r} must have rewards by exit code, such as {{0: 1.0}}"
        ) from None
