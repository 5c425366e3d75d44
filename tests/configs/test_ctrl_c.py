"""Ctrl-C before a command has begun its work: there is nothing to clean up, and a traceback says nothing."""

import signal
import subprocess
import sys

import pytest

INTERRUPTED_WHILE_IT_IMPORTS = """
import os, signal, sys
from importlib import import_module

signal.signal(signal.SIGINT, {before})  # a shell starts what it puts aside with Ctrl-C ignored
cli, imported = import_module(sys.argv.pop(1)), sys.argv.pop(1)

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == imported:
            print("interrupted", flush=True)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
cli.main()
"""
COMMANDS = [
    ("slipstream.buffer.cli", "zmq"),
    ("slipstream.learner.cli", "slipstream.configs.schema"),
    ("slipstream.rollout_servers.cli", "slipstream.configs.load"),
    ("slipstream.tools.cli", "slipstream.configs.runtime.errors"),
    ("slipstream.tools.cli", "importlib.metadata"),
]
"""Each with something that it imports."""


def interrupted(command: str, imported: str, *, before: str) -> subprocess.CompletedProcess[str]:
    code = INTERRUPTED_WHILE_IT_IMPORTS.format(before=before)
    return subprocess.run(
        [sys.executable, "-c", code, command, imported, "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


@pytest.mark.parametrize(("command", "imported"), COMMANDS)
def test_ctrl_c_while_a_command_imports_shows_no_traceback(command: str, imported: str) -> None:
    done = interrupted(command, imported, before="signal.default_int_handler")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "interrupted\n", "")


@pytest.mark.parametrize(("command", "imported"), COMMANDS[:1])
def test_ctrl_c_that_is_ignored_stays_ignored(command: str, imported: str) -> None:
    done = interrupted(command, imported, before="signal.SIG_IGN")
    assert done.returncode == 0
    assert done.stdout.startswith("interrupted\nusage: ")
