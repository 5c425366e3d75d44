"""The Grafana dashboard: generated, and of metrics that the processes serve."""

import json
import re
from collections.abc import Iterator

import pytest

from slipstream.buffer.readings import Timer, readings
from slipstream.buffer.store.types import LedgerSnapshot
from slipstream.buffer.wire import messages as m
from slipstream.configs.runtime.exposition import PREFIX, Reading
from slipstream.learner.metrics.catalog import CATALOG
from slipstream.learner.metrics.prometheus import export
from slipstream.rollout_servers.server import METRICS
from slipstream.tools.grafana import FILE, dashboard

OF_SERVERS = ("tickets", "groups_total", "weight_updates_total", "stall_seconds_total")
"""Metrics of a rollout server that are not in its status."""


def buffer_readings() -> list[Reading]:
    counts = m.LedgerCounts(
        reasons={"filtered:pf_ppo": 2, "expired:stale": 1}, answers_dropped={"stale": 8}, in_flight=3, ready=4, leased=5
    )
    standing = LedgerSnapshot(counts, 7, tasks={}, evaluated=[], evaluating=None, slices_left=0)
    credits = {"r0": m.Credits(capacity=64, status=m.ServerStatus(), held=["1", "2"])}
    timer = Timer()
    with timer.time("store"):
        pass
    with pytest.raises(KeyError), timer.time("lease"):
        raise KeyError
    return list(readings(standing, credits, length_bias={"stale": 0.25}, timer=timer))


def exported() -> Iterator[str]:
    """Names of all metrics that processes serve."""
    for kind in ("step", "eval"):
        for name in (name for metric in CATALOG[kind] for name in metric.names):
            found = export(name.replace("<", "").replace(">", ""), kind)
            if found is not None:
                yield found[0]
    for reading in buffer_readings():
        yield reading.name + "_total" * reading.counts
    for name, _, counts in METRICS.values():
        yield f"server_{name}" + "_total" * counts
    for name in OF_SERVERS:
        yield f"server_{name}"


def test_committed_dashboard_is_current() -> None:
    assert FILE.read_text(encoding="utf-8") == dashboard(), "run python -m slipstream.tools.grafana"


def test_queries_name_exported_metrics() -> None:
    panels = json.loads(dashboard())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    names = {name for query in queries for name in re.findall(rf"{PREFIX}(\w+)", query)}
    assert len(names) > 40
    assert names <= set(exported())
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_panels_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in json.loads(dashboard())["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        taken |= cells


def test_buffer_serves_groups_by_state_and_drops_by_reason() -> None:
    values = {reading.name: reading.value for reading in buffer_readings()}
    assert values["buffer_groups"] == {"in_flight": 3, "ready": 4, "leased": 5}
    assert (values["buffer_filtered"], values["buffer_expired"]) == ({"pf_ppo": 2}, {"stale": 1})
    assert (values["buffer_answers_dropped"], values["buffer_length_bias"]) == ({"stale": 8}, {"stale": 0.25})
    assert (values["buffer_server_tickets"], values["buffer_policy_version"]) == ({"r0": 2}, 7)
    assert values["buffer_calls"] == {"store": 1}
