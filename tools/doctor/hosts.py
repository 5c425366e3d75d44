"""Questions to other hosts, by ssh."""

import json
import shlex
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.tools.doctor import probe

LOGIN_S = 10
HOST_S = 60.0
"""Time for all answers of a host."""
TRIES = 5
"""Of the clock: the fastest answer is the most exact."""


class HostError(SlipstreamError):
    """No answer came from a host."""


@dataclass(frozen=True)
class Answer:
    """A host's answer.

    Attributes:
        ahead_s: its clock minus this host's.
        uncertain_s: half the time of the question that gave `ahead_s`.
        outcomes: of `reach`, for each target.
    """

    ahead_s: float
    uncertain_s: float
    outcomes: tuple[str, ...]


def ask(host: str, targets: Sequence[tuple[str, int, float]]) -> Answer:
    """Time and outcomes of `reach` for each target, from another host. Raises: HostError."""
    script = Path(probe.__file__).read_text(encoding="utf-8")
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={LOGIN_S}", host]
    try:
        process = subprocess.Popen(
            [*command, f"python3 -c {shlex.quote(script)}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError:
        raise HostError("there is no ssh here; install its client") from None
    timer = threading.Timer(HOST_S, process.kill)
    timer.start()
    with process:
        try:
            return _converse(process, targets)
        except (OSError, ValueError):  # it has ended, or printed something else
            process.kill()
            _, errors = process.communicate()
            late = "no answer in time" if not timer.is_alive() else "no answer"
            raise HostError((errors.strip().splitlines() or [late])[-1]) from None
        finally:
            timer.cancel()
            process.kill()


def _converse(process: subprocess.Popen[str], targets: Sequence[tuple[str, int, float]]) -> Answer:
    """Raises: OSError or ValueError when the other side ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    json.loads(process.stdout.readline())
    clocks = []
    for _ in range(TRIES):
        began = time.time()
        answer = _exchange(process.stdin, process.stdout, [])
        ended = time.time()
        clocks.append(((ended - began) / 2, answer["time"] - (began + ended) / 2))
    uncertain_s, ahead_s = min(clocks)
    return Answer(ahead_s, uncertain_s, tuple(_exchange(process.stdin, process.stdout, targets)["outcomes"]))


def _exchange(requests: IO[str], answers: IO[str], targets: Sequence[tuple[str, int, float]]) -> dict[str, Any]:
    requests.write(json.dumps(targets) + "\n")
    requests.flush()
    answer: dict[str, Any] = json.loads(answers.readline())
    return answer
