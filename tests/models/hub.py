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
    """Answers for `repositories` (models, data sets): one commit, the branch `main` and the tag `v1`."""

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
        if parts[0] == "api":
            _, _, organisation, name, *rest = [*parts, "", "", ""][: max(4, len(parts))]
        else:
            organisation, name, *rest = parts[1:] if parts[0] == "datasets" else parts
        kind, revision, *path = [*rest, "revision", "main"][: max(2, len(rest))]
        folder = self.repositories.get(f"{organisation}/{name}")
        if folder is None:
            return self._error("RepoNotFound")
        if revision not in ("main", "v1", COMMIT):
            return self._error("RevisionNotFound")
        if kind == "resolve":
            file = folder.joinpath(*path)
            if not file.is_file():
                return self._error("EntryNotFound")
            return self._send(file.read_bytes(), "application/octet-stream", body=body)
        files = {str(each.relative_to(folder)): each for each in sorted(folder.rglob("*")) if each.is_file()}
        answer: object = {
            "id": f"{organisation}/{name}", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files],
        }  # fmt: skip
        if kind == "tree":
            answer = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": etag(file)}
                for name, file in files.items()
            ]
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
