"""Metrics of the learner under the names of Prometheus."""

import math

import pytest

from slipstream.learner.metrics.catalog import CATALOG
from slipstream.learner.metrics.prometheus import PrometheusTracker, export


@pytest.mark.parametrize(
    ("key", "kind", "name", "label", "part"),
    [
        ("reward", "step", "reward", "", ""),
        ("wait_s", "step", "wait_seconds", "", ""),
        ("tokens_generated_per_s", "step", "tokens_generated_per_second", "", ""),
        ("score/exact_match", "step", "score", "reward", "exact_match"),
        ("ended/stop", "step", "ended_stop", "", ""),
        ("failed/superseded", "eval", "eval_failed_by_reason", "reason", "superseded"),
        ("failed", "eval", "eval_failed", "", ""),
        ("eval_s", "eval", "eval_seconds", "", ""),
    ],
)
def test_names_and_labels(key: str, kind: str, name: str, label: str, part: str) -> None:
    found = export(key, "eval" if kind == "eval" else "step")
    assert found is not None
    assert (found[0], *found[2:]) == (name, label, part)


@pytest.mark.parametrize("key", ["kind", "buffer/ready", "no_metric"])
def test_what_others_serve_is_left_out(key: str) -> None:
    assert export(key, "step") is None


def test_no_two_metrics_share_a_name() -> None:
    names = dict[str, tuple[str, str]]()
    for kind in ("step", "eval"):
        for pattern in (name for metric in CATALOG[kind] for name in metric.names):
            found = export(pattern.replace("<", "").replace(">", ""), kind)
            if found is not None:
                assert names.setdefault(found[0], (pattern, found[2])) == (pattern, found[2])


def test_latest_record_of_each_kind_is_read() -> None:
    tracker = PrometheusTracker()
    assert list(tracker.readings()) == []
    for step in (1, 2):
        tracker.log({"kind": "step", "step": step, "score/a": step, "score/b": math.nan, "buffer/ready": 5})
    tracker.log({"kind": "eval", "step": 1, "score": 0.5})
    tracker.log({"kind": "finish", "time_s": 9.0})
    values = {reading.name: reading.value for reading in tracker.readings()}
    assert values["step"] == 2
    assert isinstance(values["score"], dict)
    assert (values["score"]["a"], math.isnan(values["score"]["b"])) == (2, True)
    assert (values["eval_step"], values["eval_score"]) == (1, 0.5)
