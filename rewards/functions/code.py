"""The reward `code`: tests of a Python program, run in the sandbox of this host or of a Sandbox Fusion server."""

import ast
import asyncio
import json
import re
import secrets
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass as frozen
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from slipstream.configs.runtime.sandbox import SandboxLimits, find_interpreter, run_python
from slipstream.rewards.base import Episode, RewardUnavailable, Score
from slipstream.rewards.endpoint import Endpoint

Outcome = Literal["passed", "failed", "timeout"]

_BLOCK: Final = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)


@frozen(frozen=True)
class Case:
    """One test of a program.

    Attributes:
        checks: Python code behind the program, which must run to its end.
        stdin: the program's input.
        stdout: the output that it must print, white space at line ends aside; None: any.
    """

    checks: str = ""
    stdin: str = ""
    stdout: str | None = None


@dataclass(kw_only=True, config=ConfigDict(extra="forbid"))
class Code:
    """1 if the answer's program passes all tests, else 0.

    The program is the last code block between ```, else the whole answer if it is Python. The parts are `parsed` (1 if
    there is a program), `passed` and `timeout` (shares of the tests).

    Raises: SandboxUnavailable. When called: ValueError for a task without tests, RewardUnavailable.
    """

    tests: str = "tests"
    """Key of the task's info with its tests; without it the reference is taken: Python code (asserts), a list of such
    texts, a list of {input, output}, or {inputs, outputs}; or any of these as JSON."""
    partial: bool = False
    """Score the share of the passed tests."""
    setup: str = ""
    """Python code before the program, such as imports."""
    limits: dict[str, float] = Field(default_factory=dict)
    """Limits of each test: `cpu_s`, `wall_s`, `memory_bytes`, `processes`, `output_bytes`, `file_bytes`."""
    python: str | None = None
    """The sandbox's interpreter, for packages that programs need; unset: that of this process, or the system's."""
    allow_unconfined: bool = False
    """Run programs with limits only, with network and files, if bubblewrap can't run."""
    url: str | None = None
    """Address of a Sandbox Fusion server; unset: the sandbox of this host."""
    concurrency: int = Field(default=16, ge=1)
    """Requests to that server at a time, of each worker."""

    def __post_init__(self) -> None:
        whole = {key: value if key.endswith("_s") else int(value) for key, value in self.limits.items()}
        self._limits = SandboxLimits(**whole)  # type: ignore[arg-type]
        self.worst_case_s = self._limits.wall_s  # of one test
        if self.url is None:
            find_interpreter(self.python, allow_unconfined=self.allow_unconfined)
        else:
            self._endpoint = Endpoint(
                self.url, timeout_s=self._limits.wall_s + 30, retries=3, concurrency=self.concurrency
            )
            self.worst_case_s = self._endpoint.worst_case_s

    async def __call__(self, episode: Episode) -> Score:
        """See the class."""
        tests = read_tests(episode.info.get(self.tests, episode.reference))
        program = find_program(episode.answer)
        if program is None:
            return Score(0.0, {"parsed": 0.0, "passed": 0.0, "timeout": 0.0})
        outcomes = await asyncio.gather(*(self._run(program, test) for test in tests))
        passed, late = (outcomes.count(each) / len(outcomes) for each in ("passed", "timeout"))
        value = passed if self.partial else float(passed == 1)
        return Score(value, {"parsed": 1.0, "passed": passed, "timeout": late})

    def has_tests(self, info: Mapping[str, Any]) -> bool:
        """False if a task's tests are its reference, which then is no answer."""
        return self.tests in info

    async def _run(self, program: str, test: Case) -> Outcome:
        parts = [part for part in (self.setup, program, test.checks) if part]
        code = "\n\n".join(parts)
        if self.url is not None:
            return await self._run_remotely(code, test)
        result = await run_python(
            code,
            stdin=test.stdin,
            limits=self._limits,
            python=self.python,
            allow_unconfined=self.allow_unconfined,
        )
        if result.ended in ("cpu", "wall"):
            return "timeout"
        if test.stdout is None:
            return "passed" if result.finished else "failed"
        return "passed" if result.exit_code == 0 and _same_lines(result.stdout, test.stdout) else "failed"

    async def _run_remotely(self, code: str, test: Case) -> Outcome:
        """Source: the API `run_code` of github.com/bytedance/SandboxFusion."""
        token = secrets.token_hex(16)
        body = {
            "code": f"{code}\n\nprint('\\n{token}')\n" if test.stdout is None else code,
            "language": "python",
            "stdin": test.stdin,
            "run_timeout": self._limits.wall_s,
            "memory_limit_MB": self._limits.memory_bytes >> 20,
        }
        reply = await self._endpoint.post("/run_code", body)
        run = reply.get("run_result") if isinstance(reply, dict) else None
        if not isinstance(run, dict) or reply.get("status") == "SandboxError":
            raise RewardUnavailable(f"{self.url}: {str(reply)[:200]}")
        if run.get("status") == "TimeLimitExceeded":
            return "timeout"
        stdout = str(run.get("stdout") or "")
        if run.get("status") != "Finished" or run.get("return_code") != 0:
            return "failed"
        if test.stdout is None:
            return "passed" if stdout.rstrip().rpartition("\n")[2] == token else "failed"
        return "passed" if _same_lines(stdout, test.stdout) else "failed"


def read_tests(given: Any) -> list[Case]:
    """The tests of a task. Raises: ValueError if there are none."""
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        with suppress(json.JSONDecodeError):  # Python code may begin so, too
            given = json.loads(given)
    if isinstance(given, dict) and "inputs" in given:
        given = [{"input": i, "output": o} for i, o in zip(given["inputs"], given["outputs"], strict=True)]
    items = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    tests = [_read_test(item) for item in items if item]
    if not tests:
        raise ValueError("the task has no tests")
    return tests


def _read_test(item: Any) -> Case:
    if isinstance(item, str):
        return Case(checks=item)
    if isinstance(item, dict) and "output" in item:
        return Case(stdin=str(item.get("input", "")), stdout=str(item["output"]))
    raise ValueError(f"a test is Python code or a mapping of input and output, not {repr(item)[:100]}")


def find_program(answer: str) -> str | None:
    """The program of an answer; None without one."""
    blocks = _BLOCK.findall(answer)
    if blocks:
        return str(blocks[-1])
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes such as \w
            ast.parse(answer)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return answer if answer.strip() else None


def _same_lines(given: str, wanted: str) -> bool:
    first, second = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (given, wanted))
    return first == second
