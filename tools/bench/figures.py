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


def write_figures(
    folder: Path, part: str, figures: Sequence[Figure], *, settings: Mapping[str, Any], details: Mapping[str, Any]
) -> Path:
    """Writes `<part>-<time>.json` into `folder`; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    path = folder / f"{part}-{stamp}.json"
    record = {
        "time": now,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()},
        "settings": settings,
        "figures": [{**asdict(figure), "met": figure.met} for figure in figures],
        "details": details,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path
