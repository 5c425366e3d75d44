"""The command `slipstream` in a process of its own, and the demo's configuration."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slipstream.configs import RunConfig
from slipstream.configs.load import load_config

DEADLINE_S = 200.0
"""For a command that starts processes which load torch, on a busy machine."""
DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


def until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; fails at the deadline."""
    until_within(DEADLINE_S, condition, pause_s=0.01)


def until_within(deadline_s: float, condition: Callable[[], bool], *, pause_s: float = 0.5) -> None:
    """As `until`, with another deadline, for conditions that take longer to find out."""
    give_up = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true in time"
        time.sleep(pause_s)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "slipstream.tools.cli", *map(str, arguments)]


def slipstream(
    *arguments: object, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end; `environment` is None for that of this process."""
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def demo_config(folder: Path, *overrides: str) -> RunConfig:
    """The demo's configuration, with its runs in `folder`."""
    return load_config(DEMO, [f"run.dir={folder / 'runs'}", *overrides])
