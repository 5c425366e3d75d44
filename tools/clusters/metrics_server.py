"""A run's latest figures as JSON, for autoscalers: `python -P -m slipstream.tools.clusters.metrics_server CONFIG`.

They come from the run folder's metrics.jsonl; before the first step the answer is 503.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from slipstream.configs.arguments import exit_code, read_run_arguments, run_parser
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.signals import exit_on_signals
from slipstream.tools.follow import parse_lines

PORT: Final = 9400
WANTED: Final = "servers_wanted"
STEPS: Final = 20
"""Steps over which figures are averaged."""
TAIL_BYTES: Final = 256 << 10
"""End of metrics.jsonl that is read: more than so many records."""
MOST_GROWTH: Final = 4.0
"""Most by which the number of servers is to grow at a time."""


def figures(steps: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Idle shares and servers, averages over the last steps, and the servers that would leave nobody idle.

    With the present servers N, the learner idle for a share l of its time and the servers for a share g, both sides
    work all the time with N (1 - g) / (1 - l) servers.

    Returns: None without steps.
    """
    last = steps[-STEPS:]
    if not last:
        return None
    keys = {
        "learner_idle_fraction": "learner_idle_fraction",
        "generator_idle_fraction": "generator_idle_fraction",
        "servers": "weights/members",
    }
    means = {name: sum(float(step.get(key) or 0.0) for step in last) / len(last) for name, key in keys.items()}
    growth = (1 - means["generator_idle_fraction"]) / max(1 - means["learner_idle_fraction"], 1 / MOST_GROWTH)
    return {"step": float(last[-1]["step"]), **means, WANTED: max(1.0, means["servers"] * growth)}


def latest(paths: RunPaths) -> dict[str, float] | None:
    """The figures of a run; None before its first step."""
    try:
        with paths.metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            records = parse_lines(file.read())
    except FileNotFoundError:
        return None
    return figures([record for record in records if record.get("kind") == "step"])


def serve(paths: RunPaths, *, host: str = "0.0.0.0", port: int = PORT) -> ThreadingHTTPServer:
    """A server that listens already; `serve_forever` answers."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            found = latest(paths)
            body = json.dumps(found if found is not None else {"error": "no step is done yet"}).encode()
            self.send_response(503 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests come every some seconds, and are not logged."""

    return ThreadingHTTPServer((host, port), Handler)


def main() -> None:
    """Entry point. Exits with 2 on mistakes in the configuration."""
    sys.exit(exit_code(_main))


def _main() -> int:
    _, config = read_run_arguments(run_parser("Serve a run's latest figures as JSON."))
    with exit_on_signals(), serve(config.paths) as server:
        server.serve_forever()
    return 0


if __name__ == "__main__":
    main()
