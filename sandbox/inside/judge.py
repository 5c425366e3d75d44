"""Evaluates the checks of a program that runs in another process, and reports whether they pass.

The program's functions and classes are `Remote`s; what they return is compared here, by code that the program can't
reach. What it could decide alone is refused, such as whether an object of its own equals a plain value.
"""

from __future__ import annotations

import builtins
import os

from slipstream.sandbox.inside.remote import (
    ARITHMETIC,
    COMPARISONS,
    OPERATIONS,
    Closed,
    Peer,
    Refused,
    Remote,
)

TYPE_CHECKING = False  # typing and collections.abc take as long to import as Python to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

Outcome = str
"""`passed`, `failed`, `refused`, `forged`; `ended`: the program's process has; `raised`: the program has, before."""
_CANARY: Final = "assert False"
_CALLS: Final = ("__call__", "__next__", "__iter__")
_PLAIN: Final = frozenset(
    {int, float, bool, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset, type(None), range}
)


class Judge(Peer):
    """The judge's end of the socket.

    Attributes:
        refused: whether an operation was refused.
        forged: whether an object of the program equalled one that it can't know.
    """

    refused = forged = False

    def ask(self, operation: str, *args: Any, **named: Any) -> Any:
        """See the base class. Hash values differ between processes."""
        if operation == "__hash__" and args[0]._remote_base:
            return hash(self._plain(args[0]))
        try:
            return super().ask(operation, *args, **named)
        except StopIteration as error:
            if operation == "__next__":
                raise
            raise RuntimeError("StopIteration") from error  # it would end a loop of the checks, such as all(map(…))

    def combine(self, operation: str, left: Any, right: Any) -> Any:
        """See the base class. Raises: Refused if the program would learn an expected value, or judge it itself."""
        own = type(left) is Remote and type(right) is Remote
        if not own or operation in COMPARISONS:
            left, right = self._plain(left), self._plain(right)
        if operation == "__eq__":
            return self._equal(left, right)
        if type(left) is Remote and type(right) is Remote:
            return super().ask(operation, left, right)
        if type(left) is Remote or type(right) is Remote:
            raise self._refuse(f"{operation} of a program's object and a value")
        return {**COMPARISONS, **ARITHMETIC}[operation](left, right)

    def perform(self, operation: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The result of an operation that the program asks for: calls, iteration, and what the checks' classes define.

        Raises: PermissionError.
        """
        target = args[0]
        if not (operation in _CALLS or _is_of_checks(type(target))) or operation not in OPERATIONS:
            raise self._forbid(f"{operation} of an object of the checks")
        if operation in ("getattr", "__setattr__", "__delattr__"):
            replaced = operation != "getattr" and callable(getattr(type(target), str(args[1]), None))
            if type(args[1]) is not str or args[1][:1] == "_" or replaced:
                raise self._forbid(f"attribute {args[1]!r} of an object of the checks")
        return super().perform(operation, args, named)

    def export(self, value: Any) -> int:
        """See the base class. Raises: Refused for an object whose use would give the program more than its calls."""
        if not (callable(value) or hasattr(value, "__next__") or _is_of_checks(type(value))):
            raise self._refuse(f"an argument of type {type(value).__name__}")
        return super().export(value)

    def _equal(self, left: Any, right: Any) -> bool:
        if type(left) is not Remote and type(right) is not Remote:
            return bool(left == right)
        subject, other = (left, right) if type(left) is Remote else (right, left)
        if other is None or not super().ask("compares", subject):
            return subject is other
        if super().ask("__eq__", subject, _Unknown()) is not False:
            self.forged = True
            return False
        if type(other) is Remote:
            return bool(super().ask("__eq__", left, right))
        raise self._refuse(f"== of a program's object and a {type(other).__name__}")

    def _plain(self, value: Any) -> Any:
        if type(value) is not Remote or not value._remote_base:
            return value
        plain = super().ask("plain", value)
        return plain if type(plain) in _PLAIN else value

    def _forbid(self, what: str) -> PermissionError:
        self.refused = True
        return PermissionError(what)

    def _refuse(self, reason: str) -> Refused:
        self.refused = True
        return Refused(reason)


class _Unknown:
    """Equal to nothing."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def _is_of_checks(kind: type) -> bool:
    return kind.__module__ == "__main__" or kind is _Unknown


def judge(peer: Judge, task: Any, report: Callable[[Outcome], None]) -> None:
    """Has the program run, and reports `ready` and one outcome for each check, up to the end of its process.

    Args:
        task: program, import statements for the checks, and of each check: source, the names that the program defines
            for it, and the standard library's modules that it uses without importing them.
    """
    program, imports, checks = task
    try:
        peer.ask("run", program)
    except Closed:
        report("ended")
        return
    except BaseException:  # noqa: BLE001 - whatever a program raises
        report("raised")
        return
    report("ready")
    for check in checks:
        outcome = _evaluate(peer, imports, *check)
        report(outcome)
        if outcome == "ended":
            return


def _evaluate(peer: Judge, imports: str, source: str, names: Any, modules: Any) -> Outcome:
    peer.refused = peer.forged = False
    scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}

    def run() -> None:
        defined = peer.ask("names", (*names, *modules))
        scope.update({name: __import__(name) for name in modules if name in defined})
        scope.update({name: peer.ask("global", name) for name in names if name in defined})
        exec(imports, scope)
        exec(compile(source, "checks.py", "exec", dont_inherit=True), scope)

    outcome = _attempt(run)
    if peer.forged or (outcome == "passed" and _attempt(lambda: exec(_CANARY, scope)) != "failed"):
        return "forged"
    return "refused" if peer.refused and outcome != "ended" else outcome


def _attempt(action: Callable[[], None]) -> Outcome:
    try:
        action()
    except Closed:
        return "ended"
    except BaseException:  # noqa: BLE001 - checks fail by any exception, an exit too
        return "failed"
    return "passed"


def main(status: int, socket: int, task: Any) -> None:
    """The program of the judge's process: a line on `status` for each report."""

    def report(outcome: Outcome) -> None:
        os.write(status, outcome.encode() + b"\n")

    report("started")
    judge(Judge(socket), task, report)
    os._exit(0)
