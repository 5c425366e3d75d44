"""Sums of two numbers: an env, the tool that adds, and a reward."""

import re
from collections.abc import Mapping
from typing import Any

from slipstream.env.base import Split, Task


class Sums:
    """Task i is the sum of i // limit and i % limit; every tenth one is held out."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        pairs = range(limit * limit)
        self.indices: dict[Split, list[int]] = {"train": [i for i in pairs if i % 10], "eval": list(pairs[::10])}

    def size(self, split: Split) -> int:
        return len(self.indices[split])

    def task(self, split: Split, index: int) -> Task:
        left, right = divmod(self.indices[split][index], self.limit)
        return Task(prompt=[{"role": "user", "content": f"{left} + {right} = ?"}], reference=str(left + right))

    def fingerprint(self) -> str:
        return f"sums {self.limit}"


def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


def last_number(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    """1 if the last number of the answer is the reference."""
    return float(re.findall(r"-?\d+", answer)[-1:] == [reference])
