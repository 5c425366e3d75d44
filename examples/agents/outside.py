"""Plays the tickets of a run with an agent of another Python environment; standard library only.

Opens sessions at the gateways of the run folder, posts each reward and closes. It ends when the run has.
"""

import json
import random
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

AWAY_S = 300.0
"""Time for the run to open a gateway, and for one that is away to come back."""


def post(url: str, key: str, body: Any = None) -> dict[str, Any]:
    """Posts JSON. Raises: OSError, which HTTP errors are too."""
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(body or {}).encode(), headers=head, method="POST")
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def gateway(run: Path) -> dict[str, str] | None:
    """Address and key of one of the run's gateways; None while it has none."""
    files = [*(run / "gateways").glob("*.json")]
    try:
        found: dict[str, str] = json.loads(random.choice(files).read_text(encoding="utf-8"))
    except (IndexError, FileNotFoundError):  # its server ends just now
        return None
    return found


def open_session(run: Path) -> dict[str, Any] | None:
    """A session, as soon as a ticket waits; None when the run has no gateway any more.

    Raises: OSError when its gateways do not answer for AWAY_S.
    """
    answered = time.monotonic()
    while (found := gateway(run)) is not None:
        try:
            return post(f"{found['url']}/sessions", found["key"])
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == 429:
                answered = time.monotonic()
            elif time.monotonic() - answered > AWAY_S:
                raise
        time.sleep(0.2)  # more often than Retry-After says: the run is on the same machine
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
    run, until = Path(sys.argv[1]), time.monotonic() + AWAY_S
    while gateway(run) is None:
        if time.monotonic() > until:
            sys.exit(f"{run} has no gateway: is the run with an env `agent` up?")
        time.sleep(1.0)
    with ThreadPoolExecutor(threads) as pool:
        for future in wait([pool.submit(play_sessions, run, play) for _ in range(threads)]).done:
            future.result()
