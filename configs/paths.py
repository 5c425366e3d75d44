"""The run folder `runs/<name>/`: its paths, its checkpoints, and the locks of `slipstream up` and the learner."""

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slipstream.configs.runtime.errors import ConfigError


@dataclass(frozen=True)
class RunPaths:
    """Paths of one run."""

    root: Path

    @property
    def name(self) -> str:
        """Name of the folder, also where the path is `.`."""
        return self.root.absolute().name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def logs(self) -> Path:
        """Per process one `<process>.jsonl` (structured) and one `<process>.console` (stdout and stderr)."""
        return self.root / "logs"

    @property
    def metrics(self) -> Path:
        """One JSON record per line: steps, evaluations, the end of the run."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """Final metrics of the run."""
        return self.root / "summary.json"

    @property
    def servers(self) -> Path:
        """The rollout servers' latest state."""
        return self.root / "servers.json"

    @property
    def servers_history(self) -> Path:
        """One JSON record per line: the rollout servers' state over time."""
        return self.root / "servers.jsonl"

    @property
    def events(self) -> Path:
        """One JSON record per line: restarts, servers that join or leave, the throttle's moves, warnings."""
        return self.root / "events.jsonl"

    @property
    def starts(self) -> Path:
        """For each start of the learner: command, versions of packages, machine."""
        return self.root / "run.json"

    @property
    def curves(self) -> Path:
        """Plot of the run."""
        return self.root / "curves.png"

    @property
    def samples(self) -> Path:
        """A few trajectories of each step and evaluation."""
        return self.root / "samples"

    @property
    def traces(self) -> Path:
        """Spans of each process, with `tracking.trace`."""
        return self.root / "traces"

    @property
    def prometheus(self) -> Path:
        """Addresses of the processes that serve `/metrics`, as files of Prometheus's discovery."""
        return self.root / "prometheus"

    @property
    def gateways(self) -> Path:
        """Addresses and keys of the rollout servers' gateways, a file each."""
        return self.root / "gateways"

    @property
    def checkpoints(self) -> Path:
        """One folder per saved step."""
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.root / "model"

    @property
    def initial_model(self) -> Path:
        """A model that was built for this run."""
        return self.root / "initial_model"

    @property
    def weights(self) -> Path:
        """Versions of the transport `file`, unless `weights.folder` is set."""
        return self.root / "weights"

    @property
    def spill(self) -> Path:
        """Bytes of trained groups that were moved out of Redis."""
        return self.root / "spill"

    @property
    def steps(self) -> Path:
        """One JSON record per line: what a replay of a training step needs besides groups and a checkpoint."""
        return self.root / "steps.jsonl"

    @property
    def kept_groups(self) -> Path:
        """Groups of trained steps, a file for each step."""
        return self.root / "groups"

    @property
    def redis(self) -> Path:
        """Data of the embedded Redis-protocol server."""
        return self.root / "redis"

    @property
    def learner_lock(self) -> Path:
        """Lock of this host's learner: a network file system may hold that of a host that is cut off for good."""
        return self.root / f".learner-{socket.gethostname()}.lock"


def checkpoint_name(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:06d}"


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending."""
    matches = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def unwritable_error(paths: RunPaths, error: OSError) -> ConfigError:
    """The error for a run folder that can't be made or written to."""
    return ConfigError(
        f"run.dir={paths.root.parent}: can't write {error.filename or paths.config}: {error.strerror}; name a folder "
        "for runs that this process may write to and whose disk has room"
    )


UP: Final = "`slipstream up`"
LEARNER: Final = "learner"
LOOK_S: Final = 0.01
LOOKS: Final = 5
"""Attempts to get a lock, and the time between them."""


@contextmanager
def hold_run_lock(paths: RunPaths, *, by: str) -> Iterator[None]:
    """Context that holds the run's lock of the kind `by`; the kernel releases it however the process ends.

    Raises: ConfigError when another process holds it, or the folder can't be written to.
    """
    path = _lock_path(paths, by)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+b", buffering=0)
    except OSError as error:
        raise unwritable_error(paths, error) from None
    with lock:
        # Those who only look, as the dashboard, hold it for an instant.
        for _ in range(LOOKS):
            if _try_lock(lock.fileno(), fcntl.LOCK_EX):
                break
            time.sleep(LOOK_S)
        else:
            raise _in_use(paths, by)
        with suppress(OSError):  # on a full disk there is no room for the text; the lock needs none
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def require_unlocked(paths: RunPaths) -> None:
    """Raises: ConfigError when a process of this host holds a lock of the run. Creates no file."""
    for by in (UP, LEARNER):
        if _is_held(paths, by):
            raise _in_use(paths, by)


def is_run_locked(paths: RunPaths) -> bool:
    """True if a process of this host holds a lock of the run."""
    return any(_is_held(paths, by) for by in (UP, LEARNER))


def _is_held(paths: RunPaths, by: str) -> bool:
    try:
        with _lock_path(paths, by).open("rb") as lock:
            return not _try_lock(lock.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def _lock_path(paths: RunPaths, by: str) -> Path:
    if by == UP:  # beside the folder, because --fresh renames that
        root = paths.root if paths.root.name else paths.root.absolute()  # `.` has no name
        return root.with_name(f".{root.name}.lock")
    return paths.learner_lock


def _try_lock(file: int, kind: int) -> bool:
    # Other errors are ignored: some network file systems have no locks.
    with suppress(OSError):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _in_use(paths: RunPaths, by: str) -> ConfigError:
    holder = _lock_path(paths, by).read_text(encoding="utf-8")
    return ConfigError(f"{paths.root} is in use by another {by} ({holder}): stop that, or choose another run.name")
