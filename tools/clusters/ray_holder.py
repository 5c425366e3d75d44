"""The actor that holds a run's processes on a node of a Ray cluster.

It is sent there by value and imports the standard library alone: Ray's workers may have another environment than the
run's processes.
"""

import os
import random
import signal
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ATTEMPTS = 100
Processes = dict[str, subprocess.Popen[bytes]]


class Holder:
    """Starts processes as children, which end with this one however it ends."""

    def __init__(self) -> None:
        self._processes: Processes = {}

    def node(self) -> str:
        """The address of the node that Ray uses."""
        import ray.util

        address: str = ray.util.get_node_ip_address()
        return address

    def missing(self, files: Sequence[str]) -> list[str]:
        """The files that this node does not see."""
        return [file for file in files if not Path(file).exists()]

    def free_ports(self, host: str, count: int, first: int, last: int) -> list[int]:
        """Consecutive ports on an address of this node, between two others; empty if none were found."""
        for _ in range(ATTEMPTS):
            base = random.randrange(first, last - count)
            with suppress(OSError):
                for port in range(base, base + count):
                    with socket.socket() as probe:
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        probe.bind((host, port))
                return list(range(base, base + count))
        return []

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        withheld: Collection[str],
        folder: str,
        console: str,
    ) -> None:
        """Starts a process in a session of its own.

        Args:
            command: with `{parent}` for the id of this process.
            withheld: variables of this process that it doesn't get, besides Ray's own.
        """
        own = {key: value for key, value in os.environ.items() if key not in withheld and not key.startswith("RAY_")}
        with Path(console).open("ab") as output:
            self._processes[name] = subprocess.Popen(
                [word.replace("{parent}", str(os.getpid())) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**own, **environment},
                cwd=folder,
                start_new_session=True,
            )

    def exit_codes(self) -> dict[str, int | None]:
        """Exit codes by process; None while it runs, negative when a signal ended it."""
        return {name: process.poll() for name, process in self._processes.items()}

    def signal(self, number: int) -> None:
        """Sends a signal to the processes; SIGKILL to all of their sessions."""
        for process in self._processes.values():
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)
