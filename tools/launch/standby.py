"""Processes that import their modules ahead of a run's start, while its configuration is checked.

Run as a script (`python -m slipstream.tools.launch.standby MODULE DESCRIPTOR`), it imports what `MODULE.load` does for
the configuration, waits for the command line, and then is the process: it runs `MODULE.main`.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, BinaryIO, Self

from slipstream.configs.runtime.processes import die_with_parent
from slipstream.configs.runtime.signals import STOP_EXIT_CODES

if TYPE_CHECKING:
    from slipstream.configs import RunConfig

_ENDED = (BrokenPipeError, ConnectionResetError)
"""Errors of sending to a process that has ended."""


class Standby:
    """A process that imports its modules and waits; at the end of its `with` block it exits unless it was started."""

    def __init__(self, module: str, config: "RunConfig", environment: Mapping[str, str]) -> None:
        """
        Args:
            module: it has `load(config)`, which imports, and `main()`.
            environment: its whole environment until it is started.
        """
        self._module = module
        own, other = socket.socketpair()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipstream.tools.launch.standby", module, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[other.fileno()],
                start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - this process has one thread while it starts children
            )
        self._connection = Connection(own.detach())
        with suppress(*_ENDED):
            self._connection.send(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._connection.closed:
            self._connection.close()
            self.process.kill()
            self.process.wait()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], console: BinaryIO, cores: Collection[int]
    ) -> bool:
        """Lets the process run `MODULE.main`; False if it has ended.

        Args:
            command: `python -m MODULE ARGUMENTS…`, of which it gets the arguments.
            environment: what is added to its own.
            console: file of its output.
            cores: those that it is bound to; empty: any.
        """
        try:
            arguments = list(command)[command.index(self._module) + 1 :]
            self._connection.send((arguments, dict(environment), list(cores)))
            send_handle(self._connection, console.fileno(), self.process.pid)
        except _ENDED:
            return False
        self._connection.close()
        return True


def main() -> None:
    """Imports, waits for the command line, and runs it; exits when the other side is closed instead."""
    module, descriptor = sys.argv[1:]
    process = import_module(module)
    with Connection(int(descriptor)) as connection:
        try:
            config = connection.recv()
            with suppress(Exception):  # `main` meets and reports it again
                try:
                    process.load(config)
                except SystemExit as exiting:
                    if exiting.code in STOP_EXIT_CODES:  # by a signal: it is not sent again
                        raise
            arguments, environment, cores = connection.recv()
            console = recv_handle(connection)
        except EOFError:
            sys.exit()
    os.environ.update(environment)
    if cores:
        os.sched_setaffinity(0, cores)
    for stream in (1, 2):
        os.dup2(console, stream)
    os.close(console)
    sys.argv = [module, *arguments]
    process.main()


if __name__ == "__main__":
    main()
