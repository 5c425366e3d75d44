"""A folder tree in which commands run one after the other, confined as programs are, but with files that stay.

Each command is a sandbox of its own: its processes end with it, there is no network, and the machine's programs are
read-only. The commands may come from other programs, such as an agent's: a script starts them.
"""

import math
import os
import random
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slipstream.sandbox.process import SandboxUnavailable, own_user, system_folders
from slipstream.sandbox.seccomp import syscall_filter

PROCESSES: Final = 512
OPEN_FILES: Final = 1024
SHARED_MEMORY_BYTES: Final = 64 << 20
_ENVIRONMENT: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
_ETC: Final = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n",
}
_FILTER: Final = 9
"""File number of the filter of system calls."""


@dataclass(frozen=True, kw_only=True)
class WorkspaceLimits:
    """Limits of each command, by the kernel's limits of processes.

    Attributes:
        cpus: cores that it may use, rounded up; None: all.
        memory_bytes: address space of each process.
        file_bytes: of each file.
    """

    cpus: float | None = None
    memory_bytes: int = 4 << 30
    file_bytes: int = 10 << 30


class Workspace:
    """Files of commands, which belong to a user of their own under root."""

    def __init__(self, folder: Path, limits: WorkspaceLimits, user: int | None) -> None:
        """`folder` is empty. Raises: SandboxUnavailable."""
        self._folder, self._limits, self._user = folder, limits, user
        self._bwrap = shutil.which("bwrap")
        filter_code = syscall_filter(loopback=True)
        if self._bwrap is None or filter_code is None:
            raise SandboxUnavailable("bwrap is not on the PATH, or there is no filter of system calls for this machine")
        folder.chmod(0o711)
        for name, text in _ETC.items():
            (folder / name).write_text(text)
        (folder / "filter").write_bytes(filter_code)

    def own(self, path: Path) -> None:
        """Gives files to the commands' user."""
        if self._user is None:
            return
        os.chown(path, self._user, self._user, follow_symlinks=False)
        for folder, folders, files in os.walk(path):
            for name in (*folders, *files):
                os.chown(Path(folder, name), self._user, self._user, follow_symlinks=False)

    def script(
        self, name: str, *, writable: Mapping[str, Path], workdir: str, environment: Mapping[str, str]
    ) -> list[str]:
        """A command whose further arguments are a command to run in the sandbox; its end is that command's.

        Args:
            writable: folders of this machine by their path in the sandbox.
            environment: the command's, besides PATH, HOME and LANG; that of its caller is not passed on.
        """
        path = self._folder / name
        command = [*self._confined(), *self._view(writable), "--chdir", workdir, "--clearenv"]
        for variable, value in {**_ENVIRONMENT, **environment}.items():
            command += ["--setenv", variable, value]
        path.write_text(
            f'#!/bin/sh\nexec {shlex.join(command)} -- "$@" {_FILTER}<{shlex.quote(str(self._folder / "filter"))}\n'
        )
        path.chmod(0o755)
        return [str(path)]

    def _confined(self) -> list[str]:
        limits = self._limits
        command = ["prlimit", f"--as={limits.memory_bytes}", f"--fsize={limits.file_bytes}", "--core=0"]
        command += [f"--nofile={OPEN_FILES}"]
        if self._user is not None:  # else it would count all that this user runs on the machine
            command += [f"--nproc={PROCESSES}"]
            ids = [f"--reuid={self._user}", f"--regid={self._user}"]
            command = ["setpriv", *ids, "--clear-groups", *command]
        cores = sorted(os.sched_getaffinity(0))
        if limits.cpus is not None and math.ceil(limits.cpus) < len(cores):
            chosen = random.sample(cores, math.ceil(limits.cpus))
            command += ["taskset", "--cpu-list", ",".join(map(str, chosen))]
        return command

    def _view(self, writable: Mapping[str, Path]) -> list[str]:
        # As process 1: bubblewrap's own shows the environment of its caller, an agent with its keys.
        command = [str(self._bwrap), "--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session"]
        command += ["--uid", "0", "--gid", "0"]
        command += [
            "--seccomp",
            str(_FILTER),
            *system_folders(),
            "--ro-bind-try",
            "/etc/alternatives",
            "/etc/alternatives",
        ]
        for name in _ETC:
            command += ["--ro-bind", str(self._folder / name), f"/etc/{name}"]
        command += ["--proc", "/proc", "--dev", "/dev", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
        command += ["--remount-ro", "/dev"]
        for inside, folder in writable.items():
            command += ["--bind", str(folder), inside]
        # The root is a file system in memory without a limit.
        return [*command, "--remount-ro", "/"]


@contextmanager
def opened_workspace(folder: Path, limits: WorkspaceLimits) -> Iterator[Workspace]:
    """A workspace in an empty folder, whose commands have a user id of their own. Raises: SandboxUnavailable."""
    with own_user() as user:
        yield Workspace(folder, limits, user)
