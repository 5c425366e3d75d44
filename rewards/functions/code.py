"""The reward `code`: tests of a Python program, run in the sandbox of this host or of a Sandbox Fusion server.

Programs never judge themselves: their output is compared here, and asserts are evaluated in another process.
"""

import ast
import asyncio
import json
import re
import secrets
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass as frozen
from typing import Any, Final

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from slipstream.rewards.base import Episode, RewardUnavailable, Score
from slipstream.rewards.endpoint import Endpoint
from slipstream.sandbox import (
    Check,
    Outcome,
    SandboxLimits,
    find_interpreter,
    imports_of,
    run_checks,
    run_python,
)
from slipstream.sandbox.portable import JUDGE, judge_input

_OUTCOMES: Final[tuple[Outcome, ...]] = ("passed", "timeout", "refused", "forged")
"""Those that have a part of the score."""
_CANARY: Final = "\nassert False"
_BLOCK: Final = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)


@frozen(frozen=True)
class Case:
    """One test of a program.

    Attributes:
        checks: Python code that uses what the program defines, and must run to its end.
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
    there is a program), `passed`, `timeout`, `refused` (tests that would let a program's object decide, such as whether
    it equals a value) and `forged` (tests that passed, but so would `assert False`): shares of the tests. One that is
    forged makes the value 0.

    Raises: SandboxUnavailable. When called: ValueError for a task without tests, RewardUnavailable.
    """

    tests: str = "tests"
    """Key of the task's info with its tests; without it the reference is taken: Python code (asserts), a list of such
    texts, a list of {input, output}, or {inputs, outputs}; or any of these as JSON."""
    partial: bool = False
    """Score the share of the passed tests."""
    setup: str = ""
    """Python code before the program. Its import statements hold for asserts too, whatever the program assigns."""
    ending: str = ""
    """Python code behind the program, for answers that are only a part of one."""
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
        self.worst_case_s = self._limits.wall_s  # of one test, once it has started
        if self.url is None:
            find_interpreter(self.python, allow_unconfined=self.allow_unconfined)
        else:
            self._endpoint = Endpoint(
                self.url, timeout_s=self._limits.wall_s + 30, retries=3, concurrency=self.concurrency
            )
            self.worst_case_s = 2 * self._endpoint.worst_case_s  # a test and its canary

    async def __call__(self, episode: Episode) -> Score:
        """1 if the program passes all tests, else 0 or the share of the passed ones; parts as in the class."""
        tests = read_tests(episode.info.get(self.tests, episode.reference))
        program = find_program(episode.answer)
        if program is None:
            return Score(0.0, dict.fromkeys(("parsed", *_OUTCOMES), 0.0))
        program = "\n\n".join(part for part in (self.setup, program, self.ending) if part)
        outcomes = await self._outcomes(program, tests)
        shares: dict[str, float] = {name: outcomes.count(name) / len(outcomes) for name in _OUTCOMES}
        value = shares["passed"] if self.partial else float(shares["passed"] == 1)
        return Score(0.0 if shares["forged"] else value, {"parsed": 1.0, **shares})

    def has_tests(self, info: Mapping[str, Any]) -> bool:
        """False if a task's tests are its reference, which then is no answer."""
        return self.tests in info

    async def _outcomes(self, program: str, tests: Sequence[Case]) -> list[Outcome]:
        """The outcome of each test; asserts of one program share its process."""
        printing = [test for test in tests if test.stdout is not None]
        checks = [Check.read(test.checks) for test in tests if test.stdout is None]
        groups = [self._check(program, checks)] if checks else []
        found = await asyncio.gather(*groups, *(self._compare(program, test) for test in printing))
        return [outcome for group in found for outcome in group]

    async def _compare(self, program: str, test: Case) -> list[Outcome]:
        """The outcome of a test of the program's output."""
        if self.url is not None:
            run = await self._post(program, test.stdin)
            if run.get("status") == "TimeLimitExceeded":
                return ["timeout"]
            exit_code, stdout = run.get("return_code"), str(run.get("stdout") or "")
        else:
            result = await run_python(
                program,
                stdin=test.stdin,
                limits=self._limits,
                python=self.python,
                allow_unconfined=self.allow_unconfined,
            )
            if result.ended in ("cpu", "wall"):
                return ["timeout"]
            exit_code, stdout = result.exit_code, result.stdout
        return ["passed" if exit_code == 0 and _same_lines(stdout, test.stdout or "") else "failed"]

    async def _check(self, program: str, checks: Sequence[Check]) -> Sequence[Outcome]:
        """The outcomes of checks."""
        if self.url is None:
            return await run_checks(
                program,
                checks,
                imports=imports_of(self.setup),
                limits=self._limits,
                python=self.python,
                allow_unconfined=self.allow_unconfined,
            )
        outcomes = await asyncio.gather(*(self._check_remotely(program, check) for check in checks))
        passed = [check for check, outcome in zip(checks, outcomes, strict=True) if outcome == "passed"]
        if passed:  # a program may break out of its process there, which is not this project's sandbox
            canary = Check.read(passed[0].source + _CANARY)
            if await self._check_remotely(program, canary) == "passed":
                return ["forged" if outcome == "passed" else outcome for outcome in outcomes]
        return outcomes

    async def _check_remotely(self, program: str, check: Check) -> Outcome:
        token = secrets.token_hex(16)
        run = await self._post(JUDGE, judge_input(token, program, imports_of(self.setup), check))
        if run.get("status") == "TimeLimitExceeded":
            return "timeout"
        first, _, outcome = str(run.get("stdout") or "").rstrip().rpartition("\n")[2].partition(" ")
        known = (name for name in _OUTCOMES if first == token and name == outcome)
        return next(known, "failed")

    async def _post(self, code: str, stdin: str) -> Mapping[str, Any]:
        """The end of a program. Source: the API `run_code` of github.com/bytedance/SandboxFusion."""
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "run_timeout": self._limits.wall_s,
            "memory_limit_MB": self._limits.memory_bytes >> 20,
        }
        reply = await self._endpoint.post("/run_code", body)
        run = reply.get("run_result") if isinstance(reply, dict) else None
        if not isinstance(run, dict) or reply.get("status") == "SandboxError":
            raise RewardUnavailable(f"{self.url}: {str(reply)[:200]}")
        return run


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
