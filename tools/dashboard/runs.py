"""Runs as their folders show them: state, configuration, metrics, events, servers, warnings. Files only, read-only."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
from pydantic import BaseModel

from slipstream.configs.load import load_config
from slipstream.configs.paths import RunPaths, is_run_locked
from slipstream.configs.runtime.errors import ConfigError, suggest
from slipstream.configs.runtime.passwords import redact
from slipstream.configs.yaml_text import YamlError, read_yaml
from slipstream.learner.metrics.catalog import CATALOG
from slipstream.learner.metrics.file_catalog import FILE_CATALOG
from slipstream.tools.dashboard.columns import VERSION, MetricsTable, Table, numbers, thinned
from slipstream.tools.follow import JsonLinesFollower, LineFollower, Record, parse_line
from slipstream.tools.launch.ports import unset_ports
from slipstream.tools.launch.progress import WARNING_LEVELS, Plan, Progress, apply_log

TAIL_BYTES: Final = 256 << 10
"""Of a metrics or log file, for its latest records."""
LAST_BYTES: Final = 16 << 10
"""Of a log file, for its last record."""
MOST_WARNINGS: Final = 200
MOST_EVENTS: Final = 10_000
MOST_TABLES_BYTES: Final = 256 << 20
"""Of the metrics that are kept in memory; those of the runs that were looked at last stay."""
AT: Final = "at"
"""Seconds since 1970 in records of servers and events; their `time_s` begins anew with each start."""
FRESH_S: Final = 120.0
"""A run of another host, whose lock can't be seen from here, counts as running for this long after its last record."""


class UnknownRun(ConfigError):
    """There is no such run; the message has the known ones."""


class Run:
    """One run's folder. Every method reads files; none raises for one that is missing or damaged."""

    def __init__(self, run_id: str, folder: RunPaths) -> None:
        self.id = run_id
        self.folder = folder
        self.lock = Lock()
        self.table: MetricsTable | None = None
        self.used_at = 0.0
        self._tail: Mapping[str, Record] = {}
        self._tail_at: float | None = None

    @property
    def state(self) -> str:
        """`running`, `finished`, `failed` (its learner's last record is an error) or `stopped`."""
        if is_run_locked(self.folder):
            return "running"
        if self.folder.summary.is_file():
            return "finished"
        others = {*self.folder.root.glob(".learner-*.lock")} - {self.folder.learner_lock}
        updated_at = self.updated_at
        if others and updated_at is not None and time.time() - updated_at < FRESH_S:
            return "running"
        log = tail(self.folder.logs / "learner.jsonl", LAST_BYTES)
        return "failed" if log and log[-1].get("level") in ("error", "critical") else "stopped"

    @property
    def updated_at(self) -> float | None:
        """Seconds since 1970 of the last record."""
        return _changed_at(self.folder.metrics)

    @property
    def servers_at(self) -> float | None:
        """Seconds since 1970 of the last state of the servers."""
        return _changed_at(self.folder.servers)

    @property
    def trainer(self) -> str:
        """The kind of training; `rl` where the configuration can't be read."""
        config = self.config()
        learner = config.get("learner") if isinstance(config, dict) else None
        trainer = learner.get("trainer") if isinstance(learner, dict) else None
        return str(trainer.get("name", "rl")) if isinstance(trainer, dict) else "rl"

    def overview(self) -> Record:
        """The run's line in the list of runs."""
        last = self._last()
        step, evaluation = last.get("step", {}), last.get("eval", {})
        starts = self.starts()
        return {
            "id": self.id,
            "name": self.folder.name,
            "folder": str(self.folder.root.absolute()),
            "state": self.state,
            "step": step.get("step"),
            "steps": step.get("steps"),
            "started_at": starts[0].get("started_at") if starts else None,
            "updated_at": self.updated_at,
            "trainer": self.trainer,
            "reward": step.get("reward"),
            "score": evaluation.get("score"),
            "loss": step.get("loss"),
        }

    def detail(self) -> Record:
        """Configuration, what differs from the defaults, machine and versions, summary, and warnings."""
        return {
            **self.overview(),
            "config": self.config(),
            "changed": self.changed(),
            "run": self.starts() or None,
            "summary": _json_file(self.folder.summary),
            "warnings": self.warnings(),
        }

    def config(self) -> Any:
        """The resolved configuration, passwords redacted; empty where it is missing or can't be read."""
        try:
            return read_yaml(redact(self.folder.config.read_text(encoding="utf-8"))) or {}
        except (OSError, ValueError, YamlError):
            return {}

    def changed(self) -> Record:
        """The keys that differ from the defaults; empty where another release wrote the configuration."""
        try:
            return dict(_changed(load_config(self.folder.config), None, ""))
        except ConfigError:
            return {}

    def starts(self) -> list[Record]:
        """Versions, machine and command of each start."""
        found = _json_file(self.folder.starts)
        return [start for start in found if isinstance(start, dict)] if isinstance(found, list) else []

    def warnings(self) -> list[Record]:
        """The latest warnings and errors of all processes, oldest first."""
        found = []
        for path in sorted(self.folder.logs.glob("*.jsonl")):
            for record in tail(path):
                if record.get("level") in WARNING_LEVELS:
                    shown = apply_log(Progress(Plan("", 0, 0, None)), path.stem, record)
                    text = shown.messages.get(path.stem)
                    if text is not None:
                        found.append({
                            "time": str(record.get("timestamp", "")),
                            "process": path.stem,
                            "level": record["level"],
                            "text": text,
                        })  # fmt: skip
        return sorted(found, key=lambda warning: warning["time"])[-MOST_WARNINGS:]

    def events(self, after: int = 0) -> list[Record]:
        """The records of events.jsonl from the index `after` on."""
        follower = LineFollower(self.folder.events)
        events: list[Record] = []
        while lines := follower.lines():
            events += [record for line in lines if (record := parse_line(line)) is not None]
        return events[max(0, after) :][-MOST_EVENTS:]

    def servers(self) -> Any:
        """The latest state of all rollout servers; None where the run has recorded none."""
        return _json_file(self.folder.servers)

    def servers_history(self, points: int) -> Record:
        """Sums over the servers as columns over time: `time_s` in seconds since 1970."""
        follower, table = LineFollower(self.folder.servers_history), Table(AT)
        while lines := follower.lines():
            for line in lines:
                if (record := parse_line(line)) is not None:
                    table.add({AT: record.get("time_s"), **record})
        times, columns = table.sorted(name for name in table.names if name not in (AT, "time_s"))
        times, columns = thinned(times, columns, points)
        return {"time_s": numbers(times), "columns": {name: numbers(column) for name, column in columns.items()}}

    def _last(self) -> Mapping[str, Record]:
        """The latest record of each kind."""
        table = self.table
        if table is not None:
            with self.lock:
                table.update()
            return table.last
        updated_at = self.updated_at
        if updated_at != self._tail_at:
            self._tail_at = updated_at
            self._tail = {str(record.get("kind")): record for record in tail(self.folder.metrics)}
        return self._tail


class Runs:
    """The runs below some folders. Their ids stay the same while this object lives."""

    def __init__(self, places: Sequence[Path]) -> None:
        """
        Args:
            places: folders of runs, and folders that hold such.
        """
        self._places = places
        self._runs: dict[Path, Run] = {}
        self._lock = Lock()

    def all(self) -> list[Run]:
        """All runs, those of which a record came last first."""
        with self._lock:
            found = dict.fromkeys(_run_folders(self._places))
            taken = {run.id for run in self._runs.values()}
            for root in found:
                if root not in self._runs:
                    run_id = _free_id(RunPaths(root).name, taken)
                    taken.add(run_id)
                    self._runs[root] = Run(run_id, RunPaths(root))
            runs = [self._runs[root] for root in found]
        return sorted(runs, key=lambda run: run.updated_at or 0.0, reverse=True)

    def get(self, run_id: str) -> Run:
        """A run by its id. Raises: UnknownRun."""
        for run in [*self._runs.values(), *self.all()]:
            if run.id == run_id and run.folder.root.is_dir():
                return run
        known = [run.id for run in self.all()]
        raise UnknownRun(f"there is no run {run_id!r}{suggest(run_id, known)}; known: {', '.join(known) or 'none'}")

    def series(self, run: Run, **selection: Any) -> Record:
        """As `MetricsTable.series`, of the present content of the run's file."""
        with self._table(run) as table:
            return table.series(**selection)

    def version_of(self, run: Run) -> Callable[[int], float]:
        """A function from a step to the policy version that was the latest when it began; NaN where that is unknown."""
        with self._table(run) as table:
            steps, columns = table.steps.sorted([VERSION])
        versions = columns.get(VERSION, np.full(len(steps), np.nan))

        def version(step: int) -> float:
            before = int(np.searchsorted(steps, step)) - 1
            return float(versions[before]) if before >= 0 else 0.0

        return version

    @contextmanager
    def _table(self, run: Run) -> Iterator[MetricsTable]:
        """The run's metrics, up to date, for one thread at a time."""
        with run.lock:
            table = run.table = run.table or MetricsTable(run.folder.metrics)
            table.update()
            run.used_at = time.monotonic()
            yield table
        self._drop_oldest_tables(keep=run)

    def _drop_oldest_tables(self, *, keep: Run) -> None:
        with self._lock:
            runs = sorted(self._runs.values(), key=lambda run: run.used_at, reverse=True)
        total = 0
        for run in runs:
            table = run.table
            if table is not None:
                total += table.size_bytes
                if total > MOST_TABLES_BYTES and run is not keep:
                    run.table = None


def compare(runs: Iterable[Run]) -> list[Record]:
    """The keys whose values differ between the configurations, but for ports that none has set.

    A run that lacks a key is left out there.
    """
    flat = {run.id: dict(_flat(run.config(), "")) for run in runs}
    ports = set.intersection(*map(unset_ports, flat.values())) if flat else set()
    keys = dict.fromkeys(key for values in flat.values() for key in values if key not in ports)
    rows = []
    for key in keys:
        values = {run_id: values[key] for run_id, values in flat.items() if key in values}
        if len(values) < len(flat) or any(value != next(iter(values.values())) for value in values.values()):
            rows.append({"key": key, "values": values})
    return rows


def catalogue() -> list[Record]:
    """The metrics with their units and meanings."""
    return [
        {"name": name, "unit": metric.unit, "meaning": metric.meaning, "kind": kind}
        for kind, metrics in CATALOG.items()
        for metric in (*metrics, *FILE_CATALOG[kind])
        for name in metric.names
    ]


def tail(path: Path, most_bytes: int = TAIL_BYTES) -> list[Record]:
    """The last records of a file of JSON lines; none where there is no such file."""
    try:
        return JsonLinesFollower(path, last_bytes=most_bytes).new_records()
    except OSError:
        return []


def _run_folders(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        root = place.absolute()
        if _is_run(root):
            yield root
        elif root.is_dir():
            yield from sorted(path for path in root.iterdir() if not path.name.startswith(".") and _is_run(path))


def _is_run(root: Path) -> bool:
    folder = RunPaths(root)
    try:
        return folder.config.is_file() or folder.metrics.is_file()
    except OSError:  # another user's
        return False


def _free_id(name: str, taken: set[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}~{number}"
    return free


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _json_file(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _changed(section: BaseModel, default: object, prefix: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of a section that differ from those of `default`, or if that is of another kind, its own."""
    dumped = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        is_alike = type(default) is type(section)
        usual = getattr(default, name) if is_alike else field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            if type(usual) is not type(value) and "name" in dumped[name]:
                yield f"{key}.name", dumped[name]["name"]
            yield from _changed(value, usual, f"{key}.")
        elif value != usual:
            yield key, dumped[name]


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
