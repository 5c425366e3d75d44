"""Figures of training steps, records and summaries."""
