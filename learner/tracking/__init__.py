"""Where the learner's metrics go: always `metrics.jsonl`, and the trackers that the configuration names."""
