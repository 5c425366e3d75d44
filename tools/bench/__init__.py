"""Measurements of the pipeline."""
