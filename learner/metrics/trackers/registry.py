"""Trackers of a configuration."""

from slipstream.configs import RunConfig
from slipstream.learner.metrics.trackers.base import Tracker
from slipstream.learner.metrics.trackers.jsonl import JsonlTracker


def build_trackers(config: RunConfig) -> list[Tracker]:
    """JSONL always, SwanLab if it is configured.

    Raises: ConfigError when a configured tracker is not installed or can't start.
    """
    trackers: list[Tracker] = []
    if config.tracking.swanlab is not None:
        from slipstream.learner.metrics.trackers.swanlab import SwanlabTracker

        recorded = config.model_dump(mode="json")
        trackers.append(SwanlabTracker(config.tracking.swanlab, config.paths, run=config.run.name, recorded=recorded))
    return [JsonlTracker(config.paths.metrics), *trackers]
