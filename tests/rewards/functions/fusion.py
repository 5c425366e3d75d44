"""Sandbox Fusion's `run_code`, by a real interpreter of this machine and without a sandbox."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

PYTHON = shutil.which("python3", path="/usr/bin") or sys.executable  # any user can run it


def fusion(path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
    """Runs a program; one that has LATE or FAILS in it or its input ends so."""
    assert (path, body["language"]) == ("/run_code", "python")
    text = body["code"] + body["stdin"]
    if "FAILS" in text:
        return 200, {"status": "SandboxError", "message": "no container", "run_result": None}
    if "LATE" in text:
        return 200, {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "return_code": None}}
    run = subprocess.run(
        [PYTHON, "-I", "-c", body["code"]],
        input=body["stdin"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"]},
        cwd="/tmp",
    )
    status = {"status": "Finished", "return_code": run.returncode, "stdout": run.stdout, "stderr": run.stderr}
    return 200, {"status": "Success" if run.returncode == 0 else "Failed", "message": "", "run_result": status}
