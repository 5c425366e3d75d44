"""Figures with their goals: a line each on the screen, and a JSON file."""

import argparse
import json
import operator
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from slipstream.tools.cli import new_file

_COMPARE = {"<": operator.lt, ">=": operator.ge}
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
    unit: str
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
    """The figures of a bench."""

    def __init__(self, figures: Sequence[Figure] = ()) -> None:
        self._figures = list(figures)

    def show(self, figures: Iterable[Figure]) -> None:
        """Adds figures and prints a line for each."""
        for figure in figures:
            self._figures.append(figure)
            print(figure.line, flush=True)

    def save(
        self, file: Path, *, settings: Mapping[str, Any], details: Mapping[str, Any], machine: Mapping[str, Any] = {}
    ) -> None:
        """Writes the figures, the bench's settings and its raw measurements, and prints the file's path.

        Args:
            machine: facts besides the number of cores, the load and the Python version.
        """
        own = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        record = {
            "time": time.time(),
            "machine": {**own, **machine},
            "settings": settings,
            "figures": [{**asdict(figure), "met": figure.met} for figure in self._figures],
            "details": details,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1, default=os.fspath) + "\n", encoding="utf-8")
        print(f"kept in {file}", flush=True)

    def save_bench(
        self,
        part: str,
        arguments: argparse.Namespace,
        *,
        details: Mapping[str, Any],
        settings: Mapping[str, Any] = {},
    ) -> None:
        """As `save`, into the file that the arguments of `bench_parser` name.

        Args:
            settings: those besides the arguments.
        """
        file = arguments.json or bench_file(arguments.runs, part)
        self.save(file, settings={**vars(arguments), **settings}, details=details)


def bench_parser(part: str, description: str) -> argparse.ArgumentParser:
    """The parser of `slipstream bench <part>`, with the options that all of them have."""
    parser = argparse.ArgumentParser(prog=f"slipstream bench {part}", description=description)
    parser.add_argument("--json", type=new_file, help="file for the figures (default: one in RUNS/bench)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    return parser


def bench_file(runs: Path, part: str) -> Path:
    """The file for the figures of a bench that ends now."""
    return runs / "bench" / f"{part}-{time.strftime('%Y%m%d-%H%M%S')}.json"


def interleave(rounds: int, cases: Sequence[Case]) -> Iterator[Case]:
    """The cases in turn, `rounds` times, so that changes of the machine's speed affect all of them alike."""
    for _ in range(rounds):
        yield from cases
