"""Runs programs in the sandbox as a user; JSON from stdin to stdout: [user, limits, programs], [[seconds, result]]."""

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from slipstream.sandbox import SandboxLimits, run_python


async def run(code: str, limits: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """The duration and the result of one program."""
    began = time.monotonic()
    result = await run_python(code, limits=SandboxLimits(**limits))
    return time.monotonic() - began, asdict(result)


async def main() -> None:
    """Runs all programs, one after the other, so that durations are their own."""
    user, limits, programs = json.load(sys.stdin)
    if user != os.geteuid():
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    json.dump([await run(code, limits) for code in programs], sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
