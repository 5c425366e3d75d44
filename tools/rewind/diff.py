"""`slipstream diff`: how two runs differ: settings, versions, data, and the step at which their metrics part."""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.tools.cli import printable, table_console
from slipstream.tools.follow import MISSING, json_text
from slipstream.tools.rewind.compare import Comparison, Pair, compare, read_side, shown
from slipstream.tools.rewind.series import Parting
from slipstream.tools.rewind.settings import Difference

MIN_COLUMNS = 100
RUN_HELP = "the run's folder, its name under runs/, or a configuration file of it"


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream diff`; returns 0. Raises: ConfigError when there is no such run."""
    parser = argparse.ArgumentParser(
        prog="slipstream diff",
        description="Show how two runs differ: settings, versions, data, the first step at which each metric parts, "
        "and the likely cause. The runs may be running, finished or crashed; nothing is changed.",
    )
    parser.add_argument("a", metavar="RUN_A", help=RUN_HELP)
    parser.add_argument("b", metavar="RUN_B", help="as RUN_A")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args(argv)
    comparison = compare(read_side(arguments.a), read_side(arguments.b))
    if arguments.json:
        print(json_text(as_json(comparison)))
    else:
        _print(comparison)
    return 0


# --- output -----------------------------------------------------------------------------------------------------------


def as_json(found: Comparison) -> dict[str, Any]:
    """The comparison as JSON."""
    sides = {
        label: {
            "name": side.folder.name,
            "folder": str(side.folder.root),
            "state": side.metrics.state,
            "steps": len(side.metrics.steps),
            "restarts": [asdict(restart) for restart in side.metrics.restarts],
        }
        for label, side in (("a", found.a), ("b", found.b))
    }
    return {
        "runs": sides,
        "settings": [
            {"key": one.key, "a": one.a, "b": one.b, "default": one.default, "acts_on": list(one.acts_on)}
            for one in found.settings
        ],
        "versions": _pairs(found.versions),
        "data": _pairs(found.data),
        "other_groups_at": found.other_groups_at,
        "common_steps": found.common_steps,
        "metrics": [asdict(metric) for metric in found.metrics],
        "causes": list(found.causes),
    }


def _pairs(values: Mapping[str, Pair] | None) -> list[dict[str, Any]] | None:
    return None if values is None else [{"key": key, "a": a, "b": b} for key, (a, b) in values.items()]


def _print(found: Comparison) -> None:
    console = table_console(min_width=MIN_COLUMNS)
    for label, side in (("A", found.a), ("B", found.b)):
        metrics = side.metrics
        restarts = "".join(f", restarted at step {restart.step}" for restart in metrics.restarts)
        print(f"{label}  {side.folder.root}: {metrics.state}, {len(metrics.steps):,} steps{restarts}")
    _print_settings(console, found.settings)
    _print_facts(console, "versions and machine", found.versions, _unrecorded(found, "start", "run.json"))
    _print_facts(console, "data", found.data, _no_identity(found))
    if found.other_groups_at is not None:
        print(f"\ntrained groups: other ones from step {found.other_groups_at} on")
    parted = [(metric.name, metric.differs_at, metric.parting) for metric in found.metrics if metric.parting]
    if parted:
        rows = [
            (
                name,
                f"{differs}",
                _steps(at),
                f"{at.a:.4g}",
                f"{at.b:.4g}",
                f"{at.deviations:.0f}" if math.isfinite(at.deviations) else MISSING,
            )
            for name, differs, at in parted
        ]
        columns = ("metric", "differs at step", "parts at steps", "A there", "B there", "standard errors")
        _print_table(console, f"metrics over {found.common_steps:,} common steps", columns, rows)
    rest = [f"{metric.name} ({metric.differs_at})" for metric in found.metrics if not metric.parting]
    if rest:
        print()
        print(printable(f"metrics that differ by noise only (from step): {', '.join(rest)}"))
    print()
    for place, cause in enumerate(found.causes):
        print(f"{'also: ' if place else 'likely cause: '}{printable(cause)}")


def _print_settings(console: Console, settings: Sequence[Difference]) -> None:
    acting = [one for one in settings if one.acts_on]
    if acting:
        rows = [(one.key, *map(shown, (one.a, one.b, one.default))) for one in acting]
        _print_table(console, "settings that differ, those of training first", ("setting", "A", "B", "default"), rows)
    else:
        print("\nsettings that act on training: equal")
    others = [f"{one.key} ({shown(one.a)}, {shown(one.b)})" for one in settings if not one.acts_on]
    if others:
        print(printable(f"other settings that differ (A, B): {', '.join(others)}"))


def _print_facts(console: Console, title: str, values: Mapping[str, Pair] | None, unknown: str) -> None:
    if values is None:
        print(f"\n{title}: {printable(unknown)}")
    elif not values:
        print(f"\n{title}: equal")
    else:
        rows = [(key, shown(a), shown(b)) for key, (a, b) in values.items()]
        _print_table(console, f"{title} that differ", ("", "A", "B"), rows)


def _unrecorded(found: Comparison, field: str, file: str) -> str:
    runs = [label for label, side in (("A", found.a), ("B", found.b)) if getattr(side, field) is None]
    return f"not recorded in {' and '.join(runs)} (no {file})"


def _no_identity(found: Comparison) -> str:
    reasons = [
        f"of {label} unknown: {side.identity_error}"
        for label, side in (("A", found.a), ("B", found.b))
        if not side.identity
    ]
    return "; ".join(reasons)


def _print_table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(border_style="cyan")
    first, *others = columns
    table.add_column(first, style="bold cyan", no_wrap=True)
    for name in others:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    print(f"\n{title}")
    console.print(table)


def _steps(at: Parting) -> str:
    return f"{at.first}" if at.first == at.last else f"{at.first} to {at.last}"
