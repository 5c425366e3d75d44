"""Metrics of training steps, records and summaries."""
