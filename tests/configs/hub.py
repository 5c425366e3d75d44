"""A stand-in of the Hugging Face hub: serves folders over its HTTP API, as far as its library asks for them."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar
from urllib.parse import unquote, urlsplit

COMMIT = "1234567890abcdef1234567890abcdef12345678"


class Handler(BaseHTTPRequestHandler):
    """Answers for `repositories`, each with one commit under the branch `main` and the tag `v1`."""

    repositories: ClassVar[Mapping[str, Path]]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""

    def _answer(self, *, body: bool) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        match parts:
            case ["api", "models", organisation, name, kind, revision]:
                folder = self.repositories.get(f"{organisation}/{name}")
            case [organisation, name, "resolve" as kind, revision, *_]:
                folder = self.repositories.get(f"{organisation}/{name}")
            case _:
                return self._error("EntryNotFound")
        if folder is None:
            return self._error("RepoNotFound")
        if revision not in ("main", "v1", COMMIT):
            return self._error("RevisionNotFound")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if kind == "resolve":
            return self._send((folder / Path(*parts[4:])).read_bytes(), "application/octet-stream", body=body)
        listed = [
            {"type": "file", "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": etag(path)}
            for path in files
        ]
        answer = listed if kind == "tree" else {"id": f"{organisation}/{name}", "sha": COMMIT, "siblings": []}
        return self._send(json.dumps(answer).encode(), "application/json", body=body)

    def _send(self, content: bytes, kind: str, *, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _error(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def etag(path: Path) -> str:
    """The hash by which the library recognises a file."""
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serve_hub(repositories: Mapping[str, Path]) -> Iterator[str]:
    """The endpoint of a hub with these repositories, `organisation/name` to folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"repositories": repositories}))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
