"""Python programs of the policy, in the sandbox."""

from collections.abc import Sequence
from contextlib import AsyncExitStack

from slipstream.env.tools.schema import Tool, ToolUnavailable
from slipstream.sandbox import (
    SandboxLimits,
    SandboxResult,
    SandboxUnavailable,
    find_interpreter,
    run_python,
)


class Python:
    """The tool `python`: each call is a program of its own, without network, files and memory of earlier calls.

    Args:
        cpu_s, wall_s, memory_bytes: limits of one program.
        python: an interpreter, for the packages that it has; unset: this one. Programs see its prefixes.
        allow_unconfined: where bubblewrap can't run, run with limits only: with network and files.

    Raises: SandboxUnavailable.
    """

    def __init__(
        self,
        cpu_s: float = 5.0,
        wall_s: float = 10.0,
        memory_bytes: int = 512 << 20,
        python: str | None = None,
        allow_unconfined: bool = False,
    ) -> None:
        self._limits = SandboxLimits(cpu_s=cpu_s, wall_s=wall_s, memory_bytes=memory_bytes)
        self._python = python
        self._allow_unconfined = allow_unconfined
        self.resumable = not allow_unconfined
        find_interpreter(python, allow_unconfined=allow_unconfined)
        self.fingerprint = ""
        self.tools = (Tool.from_function(self._run, name="python"),)

    async def open(self, episode: AsyncExitStack) -> Sequence[Tool]:
        """The same tool for every episode."""
        return self.tools

    async def _run(self, code: str) -> str:
        """Runs a Python program and returns what it prints. Nothing is kept between two calls.

        Args:
            code: the program; print the results.
        """
        try:
            result = await run_python(
                code, limits=self._limits, python=self._python, allow_unconfined=self._allow_unconfined
            )
        except SandboxUnavailable as error:
            raise ToolUnavailable(f"python: {error}") from error
        return _described(result)


def _described(result: SandboxResult) -> str:
    """Outputs, and how the program ended unless by reaching its end."""
    parts = [text.rstrip("\n") for text in (result.stdout, result.stderr) if text.strip()]
    if result.ended != "exit":
        parts.append(f"[ended by its limit: {result.ended}]")
    elif result.exit_code and not result.stderr.strip():
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(parts) or "[no output]"
