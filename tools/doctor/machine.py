"""Checks of this machine: shared memory, open files, the run folder's disk, the sandbox."""

import fcntl
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from slipstream.buffer.wire.weights.layout import SHARED_MEMORY
from slipstream.configs import RunConfig
from slipstream.sandbox import SandboxUnavailable, find_interpreter
from slipstream.tools.doctor.findings import Finding, error, warning
from slipstream.tools.launch.disk import disk_problems, free_bytes, parameters

LEAST_FILES = 4096
SHARED_BYTES = 1 << 30
"""Shared memory that suffices for small models; Docker's default is 64 MB."""
TRIAL_BYTES = 64 << 20
TRIAL_SYNCS = 20
SLOW_BYTES_S = 50e6
SLOW_SYNC_S = 0.05
CODE_REWARDS = ("code", "by_source")
CODE_TOOLS = ("python",)


def machine_findings(config: RunConfig | None, runs: Path) -> Iterator[Finding]:
    """All checks of this machine; `runs` is the folder that holds the run's."""
    yield shared_memory(config)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield from disk(runs, config)
    yield sandbox(config)


def shared_memory(config: RunConfig | None, folder: Path = SHARED_MEMORY) -> Finding:
    """Room for two versions of the weights, which the transport `shm` keeps, and for what torch passes there."""
    if not folder.is_dir():
        return error(str(folder), "there is none", "mount a tmpfs there")
    free, weights = shutil.disk_usage(folder).free, _weight_bytes(config)
    value = f"{_gb(free)} free" + (f", two versions of the weights take {_gb(2 * weights)}" if weights else "")
    if free >= max(2 * weights, SHARED_BYTES):
        return Finding(str(folder), value)
    only_way = config is not None and config.weights.transport == "shm" and free < 2 * weights
    remedy = "enlarge it (Docker: --shm-size; Kubernetes: an emptyDir in memory; mount -o remount,size=…)"
    return (error if only_way else warning)(str(folder), value, remedy)


def open_files(most: int) -> Finding:
    """The hard limit, to which every process raises its own."""
    if most == resource.RLIM_INFINITY or most >= LEAST_FILES:
        return Finding("open files", "unlimited" if most == resource.RLIM_INFINITY else f"{most:,}")
    return warning("open files", f"{most:,}", f"raise the hard limit to {LEAST_FILES:,} or more: `ulimit -Hn`")


def disk(runs: Path, config: RunConfig | None) -> Iterator[Finding]:
    """Space, speed and locks of the disk on which the runs are."""
    existing = next(path for path in (runs, *runs.absolute().parents) if path.exists())
    yield Finding("disk", f"{_gb(free_bytes(runs))} free in {existing.resolve()}")
    for problem in disk_problems(config) if config is not None else []:
        value, _, change = problem.rpartition(": ")
        yield error("disk", value, change)
    remedy = f"name a folder in run.dir that {_user()} may write to, on a disk with room"
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".slipstream-doctor-") as file:
            yield from _trial(file.file)
    except OSError as problem:
        yield error("disk", f"{existing.resolve()} can't be written to: {problem.strerror}", remedy)


def _trial(file: IO[bytes]) -> Iterator[Finding]:
    """Speed of a write of 64 MB and of small ones that are synced, and locks. Raises: OSError."""
    piece = os.urandom(1 << 20)  # no disk compresses it
    began = time.monotonic()
    for _ in range(TRIAL_BYTES // len(piece)):
        file.write(piece)
    _sync(file)
    yield speed(TRIAL_BYTES / (time.monotonic() - began))
    syncs = []
    for _ in range(TRIAL_SYNCS):
        began = time.monotonic()
        file.write(piece[:4096])
        _sync(file)
        syncs.append(time.monotonic() - began)
    yield sync_time(sorted(syncs)[TRIAL_SYNCS // 2])
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        value = f"the file system has none: {problem.strerror}"
        yield error("file locks", value, "name a folder in run.dir whose file system has flock (NFS: without nolock)")


def speed(bytes_s: float) -> Finding:
    """The speed of checkpoints."""
    value = f"{bytes_s / 1e6:,.0f} MB/s"
    if bytes_s >= SLOW_BYTES_S:
        return Finding("disk writes", value)
    return warning("disk writes", value, "a checkpoint has 12 bytes for each parameter: name a faster disk in run.dir")


def sync_time(seconds: float) -> Finding:
    """The time until the disk confirms a small write."""
    value = f"{seconds * 1e3:.1f} ms"
    if seconds <= SLOW_SYNC_S:
        return Finding("disk syncs", value)
    remedy = "keep redis.fsync=everysec, or name a faster disk in run.dir (the embedded server's file is there)"
    return warning("disk syncs", value, remedy)


def sandbox(config: RunConfig | None) -> Finding:
    """Checks that programs can run in the sandbox; an error if a reward or tool of the configuration needs it."""
    needed = config is not None and (
        any((term.function or term.name) in CODE_REWARDS for term in config.scored)
        or any(tool.name in CODE_TOOLS for tool in config.env.tools)
    )
    try:
        find_interpreter()
    except SandboxUnavailable as problem:
        remedy = "apt-get install bubblewrap, and allow user namespaces where rollout servers run (docs/security.md)"
        return (error if needed else warning)("sandbox", str(problem).split(". Install")[0], remedy)
    return Finding("sandbox", "bubblewrap runs programs")


def _weight_bytes(config: RunConfig | None) -> int:
    """Bytes of one version of the weights; 0 if the model is not in a folder yet, or its adapters alone are sent."""
    if config is None or config.model.lora is not None:
        return 0
    path = config.model.path
    if path is None or not path.is_dir():
        return 0
    return parameters(path) * (4 if config.model.dtype_here == "float32" else 2)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _user() -> str:
    return f"user {os.geteuid()}"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
