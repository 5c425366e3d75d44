"""Checks of a program, which a judge evaluates in a process of its own: the program can't forge a verdict.

Program and judge each have a sandbox, as different users. They share a socket (`inside/remote.py`) and nothing else;
only the judge has the pipe of the verdicts.
"""

import ast
import builtins
import marshal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal

from slipstream.sandbox.inside import answer, judge
from slipstream.sandbox.process import (
    START_S,
    Interpreter,
    Outputs,
    Process,
    SandboxLimits,
    own_users,
    started,
)

Outcome = Literal["passed", "failed", "timeout", "refused", "forged"]
"""`refused`: the check needs an operation on a program's object that a judge does not perform; `forged`: it passed, but
so did `assert False`, or an object equalled one that it can't know."""
_OUTCOMES: Final[tuple[Outcome, ...]] = ("passed", "failed", "refused", "forged")  # as the judge reports them
_END_S: Final = 5.0  # between the end of a program's socket and that of its process


@dataclass(frozen=True)
class Check:
    """Python code that fails by an exception.

    Attributes:
        names: what it takes from the program.
        modules: modules of the standard library that it uses without importing them.
    """

    source: str
    names: tuple[str, ...]
    modules: tuple[str, ...]

    @staticmethod
    @lru_cache
    def read(source: str) -> "Check":
        """Finds the names in a check. Builtins and the standard library are Python's own, whatever the program defines,
        unless the check needs nothing else of it. Raises: ValueError if it is no Python code.
        """
        try:
            with warnings.catch_warnings(action="ignore"):  # about escapes such as \\w
                tree = ast.parse(source)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"the test {source[:100]!r} is no Python code by itself: {error}") from None
        bound = set(_bound(tree))
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        standard = {name for name in used if hasattr(builtins, name) or name in sys.stdlib_module_names}
        if not used - bound - standard:
            return Check(source, tuple(sorted(used - bound)), ())
        modules = {name for name in standard - bound if not hasattr(builtins, name)}
        return Check(source, tuple(sorted(used - standard)), tuple(sorted(modules)))


def imports_of(source: str) -> str:
    """The import statements at the top level of code; none if it is no Python code by itself."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return "\n".join(ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))


def evaluate(
    interpreter: Interpreter,
    program: str,
    imports: str,
    checks: Sequence[Check],
    limits: SandboxLimits,
    cancelled: threading.Event,
) -> list[Outcome]:
    """The outcome of each check. Raises: SandboxUnavailable.

    Checks share a process of the program until one ends it or takes too long.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(checks) and not cancelled.is_set():
        left = checks[len(outcomes) :]
        task = (program, imports, tuple((check.source, check.names, check.modules) for check in left))
        with _session(interpreter, task, limits, cancelled) as session:
            outcomes += session.outcomes(len(left))
    return outcomes


@contextmanager
def _session(
    interpreter: Interpreter, task: tuple[Any, ...], limits: SandboxLimits, cancelled: threading.Event
) -> Iterator["_Session"]:
    judge_user, program_user = own_users()
    judge_limits = replace(limits, cpu_s=START_S + limits.wall_s * len(task[2]))  # those checks' clocks bound it
    with ExitStack() as stack:
        with ExitStack() as inherited:
            first, second = (inherited.enter_context(end) for end in socket.socketpair())

            def content(module: str, *arguments: Any) -> bytes:
                return marshal.dumps((interpreter.modules, module, arguments), 2)

            judging = stack.enter_context(
                started(
                    interpreter,
                    "peer",
                    lambda status: content(judge.__name__, status, first.fileno(), task),
                    judge_limits,
                    files=[first.fileno()],
                    user=judge_user,
                )
            )
            running = stack.enter_context(
                started(
                    interpreter,
                    "peer",
                    lambda status: content(answer.__name__, status, second.fileno()),
                    limits,
                    files=[second.fileno()],
                    user=program_user,
                )
            )
        outputs = stack.enter_context(Outputs(judging, running, cancelled=cancelled))
        yield _Session(judging, running, outputs, limits)


@dataclass(frozen=True)
class _Session:
    """A program and the judge of its checks."""

    judge: Process
    program: Process
    outputs: Outputs
    limits: SandboxLimits

    def outcomes(self, checks: int) -> list[Outcome]:
        """Outcomes of the first checks, at least of one. Raises: SandboxUnavailable."""
        self._wait_for_start()
        deadline = time.monotonic() + self.limits.wall_s
        word = self._report(0, deadline)
        if word != "ready":
            return [self._outcome(word)] * checks
        found: list[Outcome] = []
        while len(found) < checks:
            word = self._report(len(found) + 1, deadline)
            outcome = self._outcome(word)
            if outcome == "timeout" and word != "wall" and found:
                break  # earlier checks have used CPU seconds: this one is evaluated again in a new process
            found.append(outcome)
            if word not in _OUTCOMES:
                break
            deadline = time.monotonic() + self.limits.wall_s
        return found

    def _wait_for_start(self) -> None:
        self.outputs.read_until(
            lambda: bool(self.program.status) or any(map(self.outputs.has_ended, (self.judge, self.program))),
            within_s=START_S,
        )
        self.judge.check_started()
        self.program.check_started()

    def _report(self, index: int, deadline: float) -> str:
        """A report of the judge, or the limit that was hit before; empty: it has ended."""

        def reports() -> list[str]:
            return self.judge.status.decode().split("\n")[1:-1]  # the first one says that it has started

        hit = self.outputs.read_until(
            lambda: len(reports()) > index or self.outputs.has_ended(self.judge),
            within_s=deadline - time.monotonic(),
        )
        return reports()[index] if len(reports()) > index else hit or ""

    def _outcome(self, report: str) -> Outcome:
        """The outcome of a check. Raises: SandboxUnavailable if the judge or the program was killed from outside."""
        for outcome in _OUTCOMES:
            if report == outcome:
                return outcome
        if report == "wall":
            return "timeout"
        if report == "":
            self.judge.ended()
        if report == "ended" and self.outputs.read_until(self._program_has_ended, within_s=_END_S) is None:
            return "timeout" if self.program.ended() == "cpu" else "failed"
        return "failed"

    def _program_has_ended(self) -> bool:
        return self.outputs.has_ended(self.program)


def _bound(tree: ast.AST) -> Iterator[str]:
    """Names that code defines itself, in any scope."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
