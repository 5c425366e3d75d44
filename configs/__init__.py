"""The run's configuration: schema, loading, plug-in look-up, logging, run folder. Imports nothing above it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.configs.schema import RunConfig
else:

    def __getattr__(name: str) -> Any:
        """The schema takes half a second to import: whoever wants something else here does not wait for it."""
        if name != "RunConfig":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from slipstream.configs.schema import RunConfig

        return RunConfig


__all__ = ["RunConfig"]
