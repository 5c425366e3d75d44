"""A stub of an HTTP server: `http_stub.py PORT [BEHAVIOUR]`; needs this project only where `command` is called."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.rollout_servers.engines.sglang.arguments import Command

ANSWERS = {
    "/refused": (400, b'{"error": {"message": "the prompt is too long", "code": 400}}'),
    "/unknown": (404, b'{"detail": "Not Found"}'),
    "/failed": (500, b'{"error": {"message": "the engine core is dead"}}'),
    "/garbled": (500, b"<html>"),
}


class Stub(BaseHTTPRequestHandler):
    """Healthy, unless told otherwise."""

    status = 200
    protocol_version = "HTTP/1.1"  # it keeps connections open
    spent = False

    def handle_one_request(self) -> None:
        """Hangs up when a connection is used again after an error, like a server that was about to close it."""
        if self.spent:
            self.rfile.readline()
            self.close_connection = True
        else:
            super().handle_one_request()

    def do_GET(self) -> None:
        """`/health`, `/environment`."""
        if self.path == "/environment":
            self.answer(200, json.dumps(dict(os.environ)).encode())
        else:
            self.answer(self.status, b"")

    def do_POST(self) -> None:
        """Errors, echoes and streams of events; after `/sickens` it is not healthy any more."""
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/hangs":
            self.rfile.read(1)  # until the client hangs up
        elif self.path == "/hangs-up":
            self.close_connection = True
        elif self.path == "/sickens":
            Stub.status = 503
            self.answer(200, b"")
        elif self.path.startswith("/events"):
            self.stream(json.loads(body), whole=self.path == "/events")
        else:
            self.answer(*ANSWERS.get(self.path, (200, body)))
            self.spent = self.path in ANSWERS

    def stream(self, events: list[str], *, whole: bool) -> None:
        """Sends events; without the last one if not `whole`."""
        lines = [f"data: {event}\n\n" for event in events] + ["data: [DONE]\n\n"] * whole
        self.answer(200, "".join([": a comment\n\n", *lines]).encode())

    def answer(self, status: int, body: bytes) -> None:
        """Sends a whole answer."""
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stays silent."""


def serve(port: int) -> ThreadingHTTPServer:
    """A server that answers from threads of its own, until its `shutdown`."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Stub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def command(folder: Path, behaviour: str = "healthy") -> "Command":
    """Starts the stub as a server; its console is `folder`/logs/stub.engine.console."""
    # Imported here: the stub's process runs without this project.
    from slipstream.rollout_servers.engines.sglang.arguments import Command
    from tests.conftest import free_port

    port = free_port()
    return Command(
        name="the stub",
        arguments=[sys.executable, __file__, str(port), behaviour],
        environment={"FOR_THE_STUB": "1"},
        port=port,
        health="/health",
        console=folder / "logs" / "stub.engine.console",
    )


def main() -> None:
    """Behaves as told, for as long as it lives."""
    port, behaviour = int(sys.argv[1]), sys.argv[2]
    if behaviour == "dies":
        sys.exit('Traceback (most recent call last):\n  File "engine.py", line 1\nRuntimeError: no such model')
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Stub.status = 503 if behaviour == "sick" else 200
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    memory = SharedMemory(create=True, size=4096)
    os.write(sys.stdout.fileno(), f"worker {worker.pid}\nmemory {memory.name}\n".encode())
    serve(port)
    time.sleep(600)


if __name__ == "__main__":
    main()
