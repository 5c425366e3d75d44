"""What a bench finds: figures with their goals, one line each, and the file that keeps them."""

import json
import operator
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

_HOLDS = {"<": operator.lt, ">=": operator.ge}


@dataclass(frozen=True)
class Goal:
    """What a figure should be."""

    relation: Literal["<", ">="]
    bound: float


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str
    goal: Goal | None = None
    """None: the figure is there to explain others."""

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached, None without one."""
        return None if self.goal is None else bool(_HOLDS[self.goal.relation](self.value, self.goal.bound))

    @property
    def line(self) -> str:
        """The figure for a reader: name, value, goal, met or missed."""
        words = f"{self.name:<46} {self.value:>12,.4g} {self.unit:<9}"
        if self.goal is None:
            return words.rstrip()
        return f"{words} goal {self.goal.relation} {self.goal.bound:g}: {'met' if self.met else 'MISSED'}"


class Figures:
    """The figures of a bench: shown as they are found, and kept in a file in the end."""

    def __init__(self, found: Sequence[Figure] = ()) -> None:
        self._found = list(found)

    def show(self, found: Sequence[Figure]) -> None:
        """Adds figures and prints a line for each."""
        self._found.extend(found)
        for figure in found:
            print(figure.line, flush=True)

    def keep(
        self,
        file: Path,
        *,
        settings: Mapping[str, Any],
        details: Mapping[str, Any],
        machine: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes all to `file`, and prints where that is.

        Args:
            settings: what the bench was told; paths among them are written as text.
            details: what the figures were made of.
            machine: what is to be known of it beside cores, load and Python.
        """
        record = {
            "time": time.time(),
            "machine": {
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "load": os.getloadavg(),
                **(machine or {}),
            },
            "settings": settings,
            "figures": [{**asdict(figure), "met": figure.met} for figure in self._found],
            "details": details,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1, default=os.fspath) + "\n", encoding="utf-8")
        print(f"kept in {file}", flush=True)


def bench_file(runs: Path, part: str) -> Path:
    """Where in the folder of the runs the figures of a bench that ends now are kept."""
    return runs / "bench" / f"{part}-{time.strftime('%Y%m%d-%H%M%S')}.json"
