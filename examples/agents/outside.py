"""Plays the tickets of a run with an agent of another Python environment; standard library only.

Opens sessions at the gateways of the run folder, posts each reward and closes. It ends when the run has.
"""

import json
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

Play = Callable[[dict[str, Any]], dict[str, float]]
"""Plays a session, whose `base_url`, `api_key`, `model` and `task` are in the answer of `POST /sessions`; returns the
parts of its reward."""

STARTING_S = 300.0
"""Time for the run to open a gateway."""


def post(url: str, key: str, body: Any = None) -> dict[str, Any]:
    """Posts JSON. Raises: OSError, which HTTP errors are too."""
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(body or {}).encode(), headers=head, method="POST")
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def gateway(run: Path) -> dict[str, str] | None:
    """Address and key of the run's gateway; None while it has none."""
    for file in (run / "gateways").glob("*.json"):
        found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
        return found
    return None


def open_session(run: Path) -> dict[str, Any] | None:
    """A session, as soon as a ticket waits; None when the run has no gateway any more."""
    while (found := gateway(run)) is not None:
        try:
            return post(f"{found['url']}/sessions", found["key"])
        except urllib.error.HTTPError as error:
            if error.code != 429:
                raise
            time.sleep(0.2)  # asks more often than Retry-After says: the run is on the same machine
        except OSError:
            time.sleep(1.0)  # its server is about to end, or to start again
    return None


def play_sessions(run: Path, play: Play) -> None:
    """One session after the other. A failure is the agent's, never a reward of 0."""
    while (session := open_session(run)) is not None:
        try:
            post(f"{session['session_url']}/reward", session["api_key"], {"reward": play(session)})
            state = "done"
        except Exception:  # noqa: BLE001  # a harness may raise anything
            traceback.print_exc()
            state = "failed"
        try:
            post(f"{session['session_url']}/close", session["api_key"], {"state": state})
        except OSError:
            traceback.print_exc()  # the session's time was over


def main(play: Play, *, threads: int = 32) -> None:
    """Plays for the run folder that the command line names."""
    run, until = Path(sys.argv[1]), time.monotonic() + STARTING_S
    while gateway(run) is None:
        if time.monotonic() > until:
            sys.exit(f"{run} has no gateway: is the run with an env `agent` up?")
        time.sleep(1.0)
    with ThreadPoolExecutor(threads) as pool:
        for future in wait([pool.submit(play_sessions, run, play) for _ in range(threads)]).done:
            future.result()
