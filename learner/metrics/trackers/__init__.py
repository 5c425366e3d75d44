"""Destinations of metrics."""
