"""Measurements of the pipeline, from a checkout: `python -m benchmarks`."""
