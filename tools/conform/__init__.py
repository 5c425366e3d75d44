"""Holds the algorithms against reference figures."""
