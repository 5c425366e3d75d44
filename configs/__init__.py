"""The run's configuration: schema, loading, plug-in look-up, logging, run folder. Imports nothing above it."""

from slipstream.configs.schema import RunConfig

__all__ = ["RunConfig"]
