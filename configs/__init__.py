"""The run's configuration (schema, loading, plug-ins, run folder) and, in `runtime`, the services of every process."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.configs.schema import RunConfig
else:

    def __getattr__(name: str) -> Any:
        """Imports the schema on first use: it takes half a second, which `configs.runtime` does not need."""
        if name != "RunConfig":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from slipstream.configs.schema import RunConfig

        return RunConfig


__all__ = ["RunConfig"]
