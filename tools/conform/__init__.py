"""`slipstream conform`: runs the vectors of a golden file through the registered functions."""

from slipstream.tools.conform.cli import command

__all__ = ["command"]
