"""Commands in a folder tree that stays, under bubblewrap itself."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.sandbox.workspace import WorkspaceLimits, opened_workspace

DEADLINE_S = 60.0
LOOPBACK = 'import socket; a = socket.create_server(("127.0.0.1", 0)); socket.create_connection(a.getsockname())'
OUTSIDE = 'import socket; socket.create_connection(("1.1.1.1", 53), 5)'
HOST = "import socket; socket.socket(socket.AF_VSOCK)"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a command in one workspace with the folder /work."""
    # Not pytest's folder, which other users can't enter.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o711)
        for each in ("files", "workspace"):
            (folder / each).mkdir()
        limits = WorkspaceLimits(cpus=0.5, memory_bytes=1 << 30, file_bytes=1 << 20)
        with opened_workspace(folder / "workspace", limits) as workspace:
            workspace.own(folder / "files")
            shell = workspace.script(
                "shell", writable={"/work": folder / "files"}, workdir="/work", environment={"NAME": "a b'c"}
            )

            def run(*command: str) -> "subprocess.CompletedProcess[str]":
                return subprocess.run(
                    [*shell, *command], capture_output=True, text=True, timeout=DEADLINE_S, check=False
                )

            yield run


def test_files_stay_and_processes_end(run: Run) -> None:
    assert run("sh", "-c", "echo 1 > a; sleep 600 & echo begun").stdout == "begun\n"
    seen = run("sh", "-c", "cat a; pwd; id -u; ls /proc | grep -c '^[0-9]*$'").stdout.split()
    assert seen[:3] == ["1", "/work", "0"]
    assert int(seen[3]) <= 5
    assert run("sh", "-c", "exit 3").returncode == 3


def test_environment_is_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a secret")
    printed = run("env").stdout
    assert "NAME=a b'c\n" in printed
    assert "secret" not in printed


@pytest.mark.parametrize(
    "command",
    [
        "touch /usr/x", "touch /etc/x", "touch /x", "python3 -c 'bytes(2 << 30)'", "head -c 2M /dev/zero > large",
        f"python3 -c '{OUTSIDE}'", f"python3 -c '{HOST}'", f"ls {Path.cwd()}", f"kill -0 {os.getpid()}",
        "mount -t tmpfs x /work",
    ],
    ids=["usr", "etc", "root", "memory", "file size", "network", "vsock", "host's files", "host's processes", "mount"],
)  # fmt: skip
def test_commands_are_confined(run: Run, command: str) -> None:
    assert run("sh", "-c", command).returncode != 0


@pytest.mark.parametrize("command", ["[ $(nproc) = 1 ]", f"python3 -c '{LOOPBACK}'", "cat <(echo 1)"])
def test_commands_have_what_programs_need(run: Run, command: str) -> None:
    assert run("bash", "-c", command).returncode == 0
