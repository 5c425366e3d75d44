"""Measurements of the pipeline. In a checkout only: the wheel leaves them out."""
