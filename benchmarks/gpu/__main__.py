"""`python -m benchmarks.gpu PART [ARGUMENT]`: a part of check.sh."""

import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.kernels import attention, head
from benchmarks.gpu.machine import environment
from benchmarks.gpu.parity import parity
from benchmarks.gpu.results import OUT
from benchmarks.gpu.runs import lengths, model, summary, updates
from benchmarks.gpu.steps import steps


def report() -> None:
    """Prints the results of kernels and parity, and all errors."""
    for file in sorted(OUT.glob("*.json")):
        for name, value in json.loads(file.read_text(encoding="utf-8")).items():
            if file.stem in ("kernels", "learner", "parity") or (isinstance(value, dict) and "error" in value):
                print(f"{file.stem} | {name}: {json.dumps(value, default=str)[:200]}")


PARTS: dict[str, Callable[..., Any]] = {
    "env": environment, "model": model, "summary": summary, "updates": updates, "steps": steps, "head": head,
    "attention": attention, "lengths": lengths, "parity": parity, "report": report,
}  # fmt: skip

if __name__ == "__main__":
    PARTS[sys.argv[1]](*sys.argv[2:])
