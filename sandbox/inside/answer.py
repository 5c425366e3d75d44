"""Runs a program, and then performs what the judge of its checks asks for."""

from __future__ import annotations

import os
import sys

from slipstream.sandbox.inside.remote import Closed, Peer

TYPE_CHECKING = False  # typing and collections.abc take as long to import as Python to start
if TYPE_CHECKING:
    from typing import Any


class Answer(Peer):
    """The program's end of the socket."""

    def __init__(self, socket: int, status: int | None) -> None:
        super().__init__(socket)
        self._status = status
        self._scope = vars(sys.modules["__main__"])

    def perform(self, operation: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """See the base class."""
        if operation == "run":
            return self._run(args[0])
        if operation == "names":
            return tuple(name for name in args[0] if name in self._scope)
        if operation == "global":
            return self._scope[args[0]]
        return super().perform(operation, args, named)

    def _run(self, source: str) -> None:
        if self._status is not None:
            os.write(self._status, b"started\n")
            os.close(self._status)
            with open("main.py", "w", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - pathlib takes long
                file.write(source)  # tracebacks show its lines
        sys.argv[:] = ["main.py"]
        self._scope["__file__"] = "main.py"
        exec(compile(source, "main.py", "exec", dont_inherit=True), self._scope)


def main(status: int | None, socket: int) -> None:
    """The program of the answer's process."""
    try:
        Answer(socket, status).serve()
    except Closed:
        os._exit(0)
