"""The latest step and evaluation as metrics for Prometheus, with names that follow from the catalogue."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Final, Literal

from slipstream.configs.runtime.exposition import Reading
from slipstream.learner.metrics.catalog import CATALOG, Metric
from slipstream.learner.metrics.destinations import Row
from slipstream.learner.metrics.file_catalog import FILE_CATALOG
from slipstream.learner.metrics.trackers import Record

OWN: Final = "buffer/"
"""Begin of the names of metrics that the buffer serves itself."""


class PrometheusTracker:
    """Keeps the latest record of each kind for scrapes; steps that no scrape sees are in `metrics.jsonl` only."""

    def __init__(self) -> None:
        self._latest: dict[Literal["step", "eval"], Record] = {}

    def log(self, record: Record) -> None:
        """Keeps a record."""
        match record.get("kind"):
            case "step":
                self._latest["step"] = record
            case "eval":
                self._latest["eval"] = record

    def add_rows(self, table: str, rows: Callable[[], Sequence[Row]]) -> None:
        """Nothing: Prometheus has no texts."""

    def close(self) -> None:
        """Nothing: the process ends, and its series with it."""

    def readings(self) -> Iterable[Reading]:
        """The metrics of the latest step and evaluation."""
        for kind, record in list(self._latest.items()):
            values = defaultdict[tuple[str, str, str], dict[str, float]](dict)
            for key, value in record.items():
                exported = export(key, kind)
                if exported is not None and isinstance(value, int | float):
                    name, meaning, label, part = exported
                    values[name, meaning, label][part] = float(value)
            for (name, meaning, label), by_part in values.items():
                yield Reading(name, meaning, by_part if label else by_part[""], label)


@cache
def export(key: str, kind: Literal["step", "eval"]) -> tuple[str, str, str, str] | None:
    """Name, meaning, label and the label's value of a metric for Prometheus; None for what is not exported.

    Args:
        key: as in a record.
    """
    if key == "kind" or key.startswith(OWN):
        return None
    catalogued = (*CATALOG[kind], *FILE_CATALOG[kind])
    names = {name for metric in catalogued for name in metric.names}
    for metric in catalogued:
        for pattern in metric.names:
            found = re.fullmatch(re.sub(r"<\w+>", "(.+)", re.escape(pattern)), key)
            if found is None:
                continue
            stem = re.sub(r"/?<\w+>", "", pattern)
            label = "".join(re.findall(r"<(\w+)>", pattern))
            name = f"{stem}_by_{label}" if label and stem in names else stem
            name = name if kind == "step" or name.startswith("eval") else f"eval/{name}"
            return prometheus_name(name), _meaning(metric), label, found[1] if label else ""
    return None


def prometheus_name(name: str) -> str:
    """A metric's name in Prometheus's manner, without the prefix: units in full."""
    name = re.sub(r"\W", "_", name)
    return re.sub(r"_per_s$", "_per_second", re.sub(r"(?<!_per)_s$", "_seconds", name))


def _meaning(metric: Metric) -> str:
    return metric.meaning + (f" ({metric.unit})" if metric.unit else "")
