"""The Grafana dashboard `docs/grafana.json`, from the table below: `python -m slipstream.tools.grafana` writes it."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slipstream.configs.runtime.exposition import PREFIX

FILE: Final = Path(__file__).resolve().parents[1] / "docs" / "grafana.json"
SCHEMA_VERSION: Final = 39
COLUMNS, WIDTH, HEIGHT = 24, 8, 8
RUN: Final = '{run=~"$run"}'
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """A plot of some series over time."""

    title: str
    series: Sequence[tuple[str, str]]
    """Legend and query of each; in a query `<name>` stands for the metric slipstream_name of the chosen runs, and
    `<name[]>` for its increase per second."""
    unit: str = "short"
    """As Grafana names units."""
    bounds: tuple[float | None, float | None] = (None, None)


SHARE: Final = (0.0, 1.0)
ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "Learning": (
        Panel("reward", [("{{run}}", "<reward>"), ("{{run}} standard deviation", "<reward_std>")]),
        Panel("scores", [("{{run}} {{reward}}", "<score>")]),
        Panel("evaluation", [("{{run}}", "<eval_score>"), ("{{run}} failed as 0", "<eval_lower_bound>")]),
        Panel("entropy", [("{{run}}", "<entropy>")], bounds=(0.0, None)),
        Panel("gradient norm", [("{{run}}", "<grad_norm>")]),
        Panel("groups without spread, answers cut off",
              [("{{run}} without spread", "<groups_without_spread>"), ("{{run}} cut off", "<answers_cut_off>")],
              "percentunit", SHARE),
    ),
    "Off-policy": (
        Panel("staleness", [("{{run}} mean", "<staleness_mean>"), ("{{run}} max", "<staleness_max>"),
                            ("{{run}} in flight", "<staleness_in_flight>"),
                            ("{{run}} in queue", "<staleness_in_queue>")]),
        Panel("effective sample size", [("{{run}}", "<ess>")], "percentunit", SHARE),
        Panel("KL(μ‖π)", [("{{run}} k1", "<kl_k1>"), ("{{run}} k3", "<kl_k3>")]),
        Panel("clipped, truncated, masked",
              [("{{run}} clipped", "<clip_fraction>"), ("{{run}} truncated", "<truncated_fraction>"),
               ("{{run}} masked", "<masked_fraction>")], "percentunit", SHARE),
        Panel("engine against learner, |Δ log-prob|", [("{{run}}", "<mismatch_abs>")]),
        Panel("answer tokens", [("{{run}} mean", "<answer_tokens>"), ("{{run}} max", "<answer_tokens_max>")]),
    ),
    "Speed": (
        Panel("step", [("{{run}} whole", "<step_seconds>"), ("{{run}} wait", "<wait_seconds>"),
                       ("{{run}} train", "<train_seconds>"), ("{{run}} publish", "<publish_seconds>")], "s"),
        Panel("idle", [("{{run}} learner", "<learner_idle_fraction>"),
                       ("{{run}} servers", "<generator_idle_fraction>")], "percentunit", SHARE),
        Panel("tokens generated per second", [("{{run}}", "<tokens_generated_per_second>")]),
        Panel("weight updates", [("{{run}} until the last server has it", "<weight_sync_seconds>"),
                                 ("{{run}} pause of a server", "<generation_stall_seconds>")], "s"),
        Panel("servers without updates", [("{{run}} unreached", "<weights_unreached>"),
                                          ("{{run}} evictions so far", "<weights_evictions>")]),
        Panel("memory of the processes", [("{{run}} {{process}}", "process_resident_memory_bytes{run=~\"$run\"}")],
              "bytes"),
    ),
    "Buffer": (
        Panel("groups", [("{{run}} {{state}}", "<buffer_groups>")]),
        Panel("groups per second", [("{{run}} issued", "<buffer_issued_total[]>"),
                                    ("{{run}} issued again", "<buffer_reissued_total[]>"),
                                    ("{{run}} filtered: {{reason}}", "<buffer_filtered_total[]>"),
                                    ("{{run}} expired: {{reason}}", "<buffer_expired_total[]>")]),
        Panel("answers dropped per second", [("{{run}} {{reason}}", "<buffer_answers_dropped_total[]>")]),
        Panel("length bias", [("{{run}} {{of}}", "<buffer_length_bias>")], bounds=SHARE),
        Panel("time of a call", [("{{run}} {{work}}", "<buffer_call_seconds_total[]> / <buffer_calls_total[]>")], "s"),
        Panel("spilled", [("{{run}}", "<buffer_spilled_bytes>")], "bytes"),
    ),
    "Rollout servers": (
        Panel("lag in versions",
              [("{{server}}", "<buffer_policy_version> - on(run) group_right <server_policy_version>")],
              bounds=(0.0, None)),
        Panel("tokens per second", [("{{server}}", "<server_tokens_total[]>")]),
        Panel("busy", [("{{server}}", "<server_busy_seconds_total[]>")], "percentunit", SHARE),
        Panel("tickets and their limit", [("{{server}}", "<server_tickets>"),
                                          ("{{server}} limit", "<server_groups_limit>")]),
        Panel("KV cache", [("{{server}}", "<server_kv_cache_ratio>")], "percentunit", SHARE),
        Panel("answers in the engine", [("{{server}} running", "<server_answers_running>"),
                                        ("{{server}} waiting", "<server_answers_waiting>")]),
        Panel("share of time paused by updates", [("{{server}}", "<server_stall_seconds_total[]>")], "percentunit",
              (0.0, None)),
        Panel("engine restarts", [("{{server}}", "<server_engine_restarts_total>")]),
    ),
}  # fmt: skip
"""Panels by the title of their row."""


def main() -> None:
    """Writes the dashboard."""
    FILE.write_text(dashboard(), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")


def dashboard() -> str:
    """The dashboard as JSON."""
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "source"},
        {
            "name": "run", "type": "query", "label": "run", "datasource": SOURCE, "refresh": 2, "sort": 1,
            "multi": True, "includeAll": True, "query": {"query": f"label_values({PREFIX}step, run)", "refId": "run"},
        },
    ]  # fmt: skip
    whole = {
        "uid": "slipstream",
        "title": "slipstream",
        "tags": ["slipstream"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": list(_panels()),
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def query(text: str) -> str:
    """The PromQL of a query in the table."""
    return re.sub(r"<(\w+)(\[\])?>", _selected, text)


def _selected(found: re.Match[str]) -> str:
    series = f"{PREFIX}{found[1]}{RUN}"
    return f"rate({series}[$__rate_interval])" if found[2] else series


def _panels() -> Iterator[dict[str, Any]]:
    top = number = 0
    for title, panels in ROWS.items():
        number += 1
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _at(top, 0, 1)}
        for index, panel in enumerate(panels):
            number += 1
            line, column = divmod(index * WIDTH, COLUMNS)
            yield _panel(panel, number, _at(top + 1 + line * HEIGHT, column, HEIGHT))
        top += 1 + HEIGHT * -(-len(panels) * WIDTH // COLUMNS)


def _at(y: int, x: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": COLUMNS if height == 1 else WIDTH, "h": height}


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    least, most = panel.bounds
    bounds = {name: bound for name, bound in (("min", least), ("max", most)) if bound is not None}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, **bounds}, "overrides": []},
        "options": {
            "tooltip": {"mode": "multi", "sort": "desc"},
            "legend": {"displayMode": "list", "placement": "bottom"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query(text), "legendFormat": legend}
            for index, (legend, text) in enumerate(panel.series)
        ],
    }


if __name__ == "__main__":
    main()
