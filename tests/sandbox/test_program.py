"""Programs in the sandbox: their results, eight attacks by two users, and where no sandbox can run."""

import asyncio
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.configs.runtime.processes import living_members
from slipstream.sandbox import (
    SandboxLimits,
    SandboxUnavailable,
    find_interpreter,
    program,
    run_python,
)

pytestmark = pytest.mark.usefixtures("sandbox")
PATIENCE_S = 60.0
LIMITS = SandboxLimits(cpu_s=2, wall_s=60)
SLACK_S = 10.0  # of a busy machine, beyond a program's limits
OTHER_USER = 12_345
USERS = [0, OTHER_USER] if os.geteuid() == 0 else [os.geteuid()]

FORKS = "import os, time\nos.fork()\ntime.sleep(600)"
FORK_BOMB = "import os\nwhile True: os.fork()"
NETWORK = """
import socket
socket.create_connection(("127.0.0.1", {port}), timeout=2)
"""
READS_HOST = """
from pathlib import Path
readable = []
for path in ["{secret}", "/etc/passwd", "/proc/self/environ", "/root", "/home"]:
    try:
        readable.append(Path(path).read_bytes() if not Path(path).is_dir() else path)
    except OSError:
        pass
print(readable)
"""
WRITES_BIG_FILE = """
for place in ["/x", "/dev/x", "/dev/shm/x", "/usr/x", "/etc/x"]:
    try:
        open(place, "w")
        print(place)
    except OSError:
        pass
with open("/tmp/big", "wb") as file:
    for _ in range(200):
        file.write(bytes(1 << 20))
"""
KILLS_PARENT = """
import os, signal
for process in [os.getppid() or 2, -1, {parent}]:
    try:
        os.kill(process, signal.SIGKILL)
    except OSError as error:
        print(type(error).__name__)
"""
ATTACKS: Mapping[str, tuple[str, str]] = {
    "fork bomb": (FORK_BOMB, "processes"),
    "endless loop": ("while True: pass", "cpu"),
    "1 GB": ("bytearray(1 << 30)", "memory"),
    "network": (NETWORK, "exit"),
    "reading the host": (READS_HOST, "exit"),
    "writing a big file": (WRITES_BIG_FILE, "files"),
    "killing the parent": (KILLS_PARENT, "exit"),
    "printing 100 MB": ("for _ in range(100): print('x' * (1 << 20))", "output"),
}
"""Program and how it ends, by attack."""


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.fixture(scope="module", params=USERS, ids=lambda user: "root" if user == 0 else "another user")
def attacked(
    request: pytest.FixtureRequest, listener: socket.socket, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[float, dict[str, Any]]]:
    """The duration and the result of each attack, started by a user."""
    secret = tmp_path_factory.mktemp("host") / "secret"
    secret.write_text("token")
    values = {"port": listener.getsockname()[1], "secret": secret, "parent": os.getpid()}
    programs = [
        code.format(**values) if code in (NETWORK, READS_HOST, KILLS_PARENT) else code for code, _ in ATTACKS.values()
    ]
    limits = {"cpu_s": LIMITS.cpu_s, "wall_s": LIMITS.wall_s}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sandboxed.py"))],
        input=json.dumps([request.param, limits, programs]),
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=8 * (LIMITS.wall_s + SLACK_S),
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(ATTACKS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_ends_within_its_limits_with_a_reason(attacked: Mapping[str, Any], attack: str) -> None:
    duration_s, result = attacked[attack]
    assert result["ended"] == ATTACKS[attack][1], result
    assert duration_s < LIMITS.wall_s + SLACK_S
    assert len(result["stdout"]) + len(result["stderr"]) <= LIMITS.output_bytes


def test_attack_has_no_effect_outside(attacked: Mapping[str, Any], listener: socket.socket) -> None:
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert "Error" in attacked["network"][1]["stderr"]
    assert attacked["reading the host"][1]["stdout"] == "[]\n"
    assert attacked["writing a big file"][1]["stdout"] == ""
    assert attacked["killing the parent"][1]["stdout"].split()[-1] == "ProcessLookupError"


@pytest.mark.parametrize(
    ("code", "exit_code", "ended"),
    [
        ("print(input()[::-1])", 0, "exit"),
        ("import atexit, os; atexit.register(os._exit, 3)", 3, "exit"),
        ("raise ValueError", 1, "exit"),
        ("return", 1, "exit"),
        ("import os; os.abort()", 139, "exit"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 159, "killed"),
        ("import os, signal; os.killpg(0, signal.SIGKILL)", 159, "killed"),
        ("import os; os._exit(137)", 159, "killed"),
        ("import subprocess; subprocess.Popen(['sleep', '60']).kill()", 0, "exit"),
    ],
)
async def test_end_of_a_program_is_its_own(code: str, exit_code: int, ended: str) -> None:
    result = await run_python(code, stdin="ab\n", limits=LIMITS)
    assert (result.exit_code, result.ended) == (exit_code, ended)
    assert result.stdout == ("ba\n" if "input" in code else "")


async def test_a_traceback_shows_the_line_of_the_program() -> None:
    result = await run_python("def f():\n    return 1 / zero\nzero = 0\nf()", limits=LIMITS)
    assert "main.py" in result.stderr
    assert "return 1 / zero" in result.stderr
    assert "exec" not in result.stderr


async def test_a_sleeping_program_ends_at_the_wall_limit() -> None:
    result = await run_python("import time; print(1, flush=True); time.sleep(60)", limits=replace(LIMITS, wall_s=3))
    assert (result.ended, result.stdout) == ("wall", "1\n")


async def test_closed_outputs_do_not_hide_a_running_program() -> None:
    code = "import os, time\nos.closerange(0, 256)\ntime.sleep(60)"
    assert (await run_python(code, limits=replace(LIMITS, wall_s=3))).ended == "wall"


async def bubblewraps(since: list[psutil.Process]) -> list[psutil.Process]:
    """This process's children that have been started `since`, once the program `FORKS` runs in one."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            children = [child for child in psutil.Process().children() if child not in since]
            with suppress(psutil.NoSuchProcess):  # a process of another program
                inner = [process.name() for child in children for process in child.children(recursive=True)]
                if sum("python" in name for name in inner) == 2:
                    return children
            await asyncio.sleep(0.01)


async def test_a_cancelled_program_is_killed() -> None:
    before = psutil.Process().children()
    running = asyncio.create_task(run_python(FORKS, limits=replace(LIMITS, wall_s=600)))
    children = await bubblewraps(before)
    running.cancel()
    await asyncio.wait([running])
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, PATIENCE_S)
    assert not alive


@pytest.mark.parametrize("killed", ["bubblewrap", "program"])
async def test_kill_from_outside_is_no_result(killed: str) -> None:
    before = psutil.Process().children()
    running = asyncio.create_task(run_python(FORKS, limits=replace(LIMITS, wall_s=600)))
    for child in await bubblewraps(before):
        for process in [child] if killed == "bubblewrap" else child.children():
            process.kill()
    with pytest.raises(SandboxUnavailable, match="signal 9"):
        await running


async def test_programs_at_once_have_users_and_process_counts_of_their_own() -> None:
    code = "import os, threading, time\nthreading.Thread(target=time.sleep, args=(0.5,)).start()\nprint(os.getuid())"
    results = await asyncio.gather(*(run_python(code, limits=replace(LIMITS, processes=8)) for _ in range(4)))
    assert all(result.exit_code == 0 for result in results)
    users = {result.stdout for result in results}
    assert len(users) == (4 if os.geteuid() == 0 else 1)
    assert "0\n" not in users


@contextmanager
def bubblewrap(script: str) -> Iterator[str]:
    """A folder with a bubblewrap of another kind; other users may read it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        program = Path(folder, "bwrap")
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        yield folder


@pytest.fixture
def failing_bubblewrap() -> Iterator[str]:
    """A folder with a bubblewrap that fails as it does without user namespaces."""
    with bubblewrap("echo 'bwrap: No permissions to create new namespace' >&2\nexit 1") as folder:
        yield folder


@pytest.mark.parametrize(("delay_s", "deadline_s"), [(1.5, 60.0), (60.0, 0.1)])
async def test_start_is_not_the_programs_time(
    delay_s: float, deadline_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_interpreter()
    monkeypatch.setattr(program, "START_S", deadline_s)
    running = run_python("print(1)", limits=replace(LIMITS, wall_s=1))
    with bubblewrap(f'sleep {delay_s}; exec {shutil.which("bwrap")} "$@"') as folder:
        monkeypatch.setenv("PATH", folder, prepend=os.pathsep)
        if delay_s > deadline_s:
            with pytest.raises(SandboxUnavailable, match="start"):
                await running
        else:
            assert (await running).ended in ("exit", "wall")  # on a busy machine printing may take the second


async def test_bubblewrap_that_was_killed_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    find_interpreter()
    marker = secrets.token_hex(8)
    monkeypatch.setattr("slipstream.sandbox.process.secrets.token_hex", lambda _: marker)
    with bubblewrap(f'{shutil.which("bwrap")} "$@" & kill -9 $$') as folder:
        monkeypatch.setenv("PATH", folder, prepend=os.pathsep)
        with pytest.raises(SandboxUnavailable, match="signal 9"):
            await run_python("import time; time.sleep(600)", limits=replace(LIMITS, wall_s=600))
    assert living_members([], f"SLIPSTREAM_SANDBOX={marker}".encode()) == {}


@pytest.fixture(params=["missing", "failing"])
def _no_bubblewrap(
    request: pytest.FixtureRequest, failing_bubblewrap: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    find_interpreter.cache_clear()
    monkeypatch.setenv("PATH", failing_bubblewrap if request.param == "failing" else "/nowhere")
    yield
    find_interpreter.cache_clear()


@pytest.mark.usefixtures("_no_bubblewrap")
async def test_without_bubblewrap_nothing_runs_unless_allowed() -> None:
    with pytest.raises(SandboxUnavailable, match="bwrap"):
        await run_python("print(1)")
    assert (await run_python("print(1)", allow_unconfined=True)).stdout == "1\n"


async def test_a_sandbox_that_fails_later_is_no_result(
    failing_bubblewrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await run_python("import sys; print('bwrap: no', file=sys.stderr); sys.exit(1)")).ended == "exit"
    monkeypatch.setenv("PATH", failing_bubblewrap)
    with pytest.raises(SandboxUnavailable, match="namespace"):
        await run_python("print(1)")


@pytest.mark.usefixtures("_no_bubblewrap")
@pytest.mark.parametrize("attack", ["fork bomb", "endless loop", "1 GB", "writing a big file", "printing 100 MB"])
async def test_unconfined_attacks_end_within_limits(attack: str) -> None:
    code = ATTACKS[attack][0].replace("/tmp/big", "big")
    result = await run_python(code, limits=LIMITS, allow_unconfined=True)
    assert result.ended == ATTACKS[attack][1]
