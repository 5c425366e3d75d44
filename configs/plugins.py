"""Finds plug-ins by name: built in, from an installed entry point, or `module:attribute`."""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from slipstream.configs.closest import closest
from slipstream.configs.errors import ConfigError


def find_plugin(kind: str, name: str, built_in: Mapping[str, Any]) -> Any:
    """What `name` stands for.

    Args:
        kind: `env`, `reward`, `advantage` or `loss`; see `entry_point_group`.
        name: a key of `built_in`, an entry point's name, or `module:attribute`.
        built_in: the names that ship with the project.

    Raises: ConfigError naming what is known, or why the import failed.
    """
    if name in built_in:
        return built_in[name]
    if ":" in name:
        return _import(kind, name)
    installed = {point.name: point for point in entry_points(group=entry_point_group(kind))}
    if name in installed:
        return _import(kind, installed[name].value)
    known = [*built_in, *installed]
    hint = closest(name, known) or f"; known: {', '.join(sorted(known))}, or module:attribute"
    raise ConfigError(f"there is no {kind} {name!r}{hint}")


def entry_point_group(kind: str) -> str:
    """Where packages announce their plug-ins: `slipstream.envs`, `slipstream.losses`, ..."""
    return f"slipstream.{kind}{'es' if kind.endswith('s') else 's'}"


def _import(kind: str, name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{kind} {name!r} must look like module:attribute")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{kind} {name!r}: module {module_name!r} can't be imported: {error}") from None
    if not hasattr(module, attribute):
        raise ConfigError(f"{kind} {name!r}: module {module_name!r} has no {attribute!r}")
    return getattr(module, attribute)
