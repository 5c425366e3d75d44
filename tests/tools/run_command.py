"""The command `slipstream`, run as a user runs it."""

import subprocess
import sys
from pathlib import Path

DEADLINE_S = 200.0
"""For a command that starts processes which load torch, on a machine that has other things to do."""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "slipstream.tools.cli", *map(str, arguments)]


def slipstream(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
