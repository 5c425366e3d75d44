"""Runs Python programs of unknown origin: bubblewrap, resource limits, a filter of system calls, a user without rights.

A program sees the interpreter's folders read-only and an empty /tmp of its own. It has no network and no other process
but its own. Started by root it runs as a user of its own, because RLIMIT_NPROC does not bind root and counts all
processes of a user. Needs bubblewrap 0.8 and user namespaces.
"""

from slipstream.sandbox.checks import Check, Outcome, imports_of
from slipstream.sandbox.interpreter import find_interpreter
from slipstream.sandbox.process import FIRST_USER, START_S, SandboxLimits, SandboxUnavailable
from slipstream.sandbox.program import SandboxResult
from slipstream.sandbox.run import run_checks, run_python

__all__ = [
    "FIRST_USER",
    "START_S",
    "Check",
    "Outcome",
    "SandboxLimits",
    "SandboxResult",
    "SandboxUnavailable",
    "find_interpreter",
    "imports_of",
    "run_checks",
    "run_python",
]
