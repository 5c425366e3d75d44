"""`slipstream dashboard` as a process."""

import re
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import httpx

from tests.tools.run_command import DEADLINE_S, command


class Server:
    """A dashboard that serves."""

    def __init__(self, process: Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=DEADLINE_S)

    def get(self, path: str, status: int = 200, **parameters: Any) -> Any:
        """The JSON of a path below `/api/`."""
        reply = self.client.get(f"/api/{path}", params=parameters or None)
        assert reply.status_code == status, reply.text
        return reply.json()


@contextmanager
def served(*places: Path, ending: int = 0) -> Iterator[Server]:
    """A dashboard over these folders, which SIGTERM ends at last; its exit code is `ending`."""
    with Popen(command("dashboard", *places, "--port", 0), stdout=PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], DEADLINE_S)[0], "it did not start in time"
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "it printed no address"
            server = Server(process, found[0])
            with server.client:
                yield server
            process.terminate()
            assert process.wait(DEADLINE_S) == ending
        finally:
            process.kill()
