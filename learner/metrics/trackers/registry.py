"""Trackers by their configuration."""

from collections.abc import Mapping
from typing import Any

from slipstream.configs.paths import RunPaths
from slipstream.configs.schema.run import TrackingConfig
from slipstream.learner.metrics.trackers.base import Tracker
from slipstream.learner.metrics.trackers.jsonl import JsonlTracker


def build_trackers(
    paths: RunPaths, tracking: TrackingConfig, *, run: str, recorded: Mapping[str, Any]
) -> list[Tracker]:
    """JSONL always, SwanLab if it is configured.

    Args:
        recorded: the configuration that SwanLab records.

    Raises: ConfigError when a configured tracker is not installed or can't start.
    """
    trackers: list[Tracker] = []
    if tracking.swanlab is not None:
        from slipstream.learner.metrics.trackers.swanlab import SwanlabTracker

        trackers.append(SwanlabTracker(tracking.swanlab, paths, run=run, recorded=recorded))
    return [JsonlTracker(paths.metrics), *trackers]
