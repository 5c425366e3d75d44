"""`python -m benchmarks.page`, from the root of a checkout: writes the tables of `docs/figures.md`.

A table stands between the comments `<!-- results: PART -->` and `<!-- end -->` and shows
`benchmarks/results/PART.json`.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Goal

PAGE = Path("docs/figures.md")
RESULTS = Path("benchmarks/results")
_BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_OWN = "value"
"""Column of a figure that belongs to no other one."""


def parts(page: str) -> set[str]:
    """The parts whose results the page shows."""
    return {part for _, part, _ in _BLOCK.findall(page)}


def filled(page: str, results: Mapping[str, Any]) -> str:
    """The page with a current table of each part's results. Raises: KeyError for a part without results."""
    return _BLOCK.sub(lambda block: f"{block[1]}{_section(block[2], results[block[2]])}{block[3]}", page)


def load_results(folder: Path = RESULTS) -> dict[str, Any]:
    """The saved results of every part, by its name."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}


def _section(part: str, record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    devices = ", ".join([f"{machine['cores']} cores", *(gpu["name"] for gpu in machine["gpus"])])
    command = shlex.join(["python", "-m", "benchmarks", part, *record["settings"].get("arguments", [])])
    context = f"`{command}`, {record['time'][:10]}, {devices}"
    tables = _tables([_figure(**fields) for fields in record["figures"]])
    return f"{context} ([results](../{RESULTS}/{part}.json)):\n\n" + "\n".join(tables)


def _figure(*, met: bool | None, goal: Mapping[str, Any] | None, **fields: Any) -> Figure:
    """`met` follows from the goal."""
    return Figure(**fields, goal=None if goal is None else Goal(**goal))


def _tables(figures: list[Figure]) -> Iterator[str]:
    """One table for all rows that have the same columns."""
    by_columns: dict[tuple[str, ...], list[str]] = {}
    for name, cells in _rows(figures).items():
        by_columns.setdefault(tuple(cells), []).append(f"| {' | '.join([name, *cells.values()])} |\n")
    for columns, rows in by_columns.items():
        head = f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}\n"
        yield head + "".join(rows)


def _rows(figures: list[Figure]) -> dict[str, dict[str, str]]:
    """Cells by row and column. "ROW: COLUMN" names both; an indented name is a column of the row before it."""
    rows: dict[str, dict[str, str]] = {}
    row = ""
    for figure in figures:
        column = figure.name.strip()
        if not figure.name.startswith(" "):
            row, _, column = figure.name.replace("|", "\\|").partition(": ")
        rows.setdefault(row, {})[column or _OWN] = _cell(figure)
    return rows


def _cell(figure: Figure) -> str:
    """Value and unit; with a goal, the goal and whether it was missed."""
    digits = f"{figure.value:,.0f}" if abs(figure.value) >= 100 else f"{figure.value:.3g}"
    text = f"{digits} {figure.unit}".strip()
    if figure.goal is None:
        return text
    return f"{text} ({figure.goal.relation} {figure.goal.bound:g}{'' if figure.met else ': **missed**'})"


def main() -> int:
    """Entry point. Returns 1 if the page has no place for some results."""
    page, results = PAGE.read_text(encoding="utf-8"), load_results()
    PAGE.write_text(filled(page, results), encoding="utf-8")
    for part in sorted(results.keys() - parts(page)):
        print(f"{PAGE} has no place for {RESULTS}/{part}.json: add <!-- results: {part} --> and <!-- end -->")
    return 1 if results.keys() - parts(page) else 0


if __name__ == "__main__":
    sys.exit(main())
