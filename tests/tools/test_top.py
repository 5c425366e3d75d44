"""`slipstream top` on files alone."""

import os
import pty
import signal
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

from slipstream.configs.paths import LEARNER, hold_run_lock
from tests.tools.conftest import CommandLine
from tests.tools.dashboard.recorded import append, make_run, step
from tests.tools.run_command import command, until


def test_a_run_that_has_ended_is_shown_once(cli: CommandLine, tmp_path: Path) -> None:
    paths = make_run(tmp_path, "a").paths
    (paths.root / "summary.json").write_text("{}")
    assert cli("top", paths.root) == 0
    for shown in ("4 of 400", "finished", "0.400", "r0", "1,234", "50%", "throttle", "learner"):
        assert shown in cli.out
    assert "\x1b[31m" not in cli.out
    assert "\x00" not in cli.out


def test_without_a_terminal_lines_follow_the_run_to_its_end(tmp_path: Path) -> None:
    paths = make_run(tmp_path, "a").paths
    lock = hold_run_lock(paths, by=LEARNER)
    lock.__enter__()
    with Popen(command("top", paths.root), stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        assert "step 4/400" in process.stdout.readline()
        append(paths.metrics, *(step(number) for number in range(5, 40)))
        assert "step 39/400" in process.stdout.readline()
        lock.__exit__(None, None, None)
        assert process.stdout.readlines()[-1] == "the run is stopped\n"
    assert process.returncode == 0


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("\x03", 128 + signal.SIGINT)])
def test_keys_leave_the_live_table(tmp_path: Path, key: str, code: int) -> None:
    paths = make_run(tmp_path, "a").paths
    with hold_run_lock(paths, by=LEARNER):
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(command()[0], command("top", paths.root), {**os.environ, "TERM": "xterm", "COLUMNS": "120"})
        shown = b""
        while b"4 of 400" not in shown.replace(b"\x1b[0m", b"").replace(b"\x1b[1m", b""):
            shown += os.read(terminal, 4096)
        os.write(terminal, key.encode())
        ended: list[Any] = []

        def has_ended() -> bool:
            try:
                os.set_blocking(terminal, False)
                os.read(terminal, 4096)
            except OSError:
                pass
            ended[:] = os.waitpid(pid, os.WNOHANG)
            return bool(ended[0])

        until(has_ended)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(ended[1]) == code


def test_what_is_no_run_is_refused(cli: CommandLine, tmp_path: Path) -> None:
    assert cli("top", tmp_path) == 2
    assert str(tmp_path) in cli.err
