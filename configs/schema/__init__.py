"""The configuration schema; `RunConfig` is its root."""

from slipstream.configs.schema.run import RunConfig

__all__ = ["RunConfig"]
