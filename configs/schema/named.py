"""Sections that are chosen by their name: one class for each built-in, one for all plug-ins."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, ClassVar, Final, Self

from pydantic import BeforeValidator, Discriminator, Field, model_validator

from slipstream.configs.closest import closest
from slipstream.configs.plugins import entry_point_group
from slipstream.configs.schema.base import Section

PLUGIN: Final = "plugin"
"""pydantic's tag of a section that names no built-in."""


class NamedSection(Section):
    """A section whose fields, but for the shared ones, are the keyword arguments of the function that it names."""

    shared: ClassVar[frozenset[str]] = frozenset({"name"})
    """Fields that are no keyword arguments."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments."""
        return {field: getattr(self, field) for field in type(self).model_fields if field not in self.shared}


class PluginSection(NamedSection):
    """A function of the user's own."""

    kind: ClassVar[str]
    """What it is called in messages."""
    built_in: ClassVar[tuple[str, ...]]
    """Names that are taken."""

    name: str
    """An installed entry point, or `module:attribute`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments."""
        return self.options

    @model_validator(mode="after")
    def _exists(self) -> Self:
        installed = [point.name for point in entry_points(group=entry_point_group(self.kind))]
        if ":" not in self.name and self.name not in installed:
            known = sorted([*self.built_in, *installed])
            hint = closest(self.name, known) or f"; known: {', '.join(known)}, or module:attribute"
            raise ValueError(f"there is no {self.kind} {self.name!r}{hint}")
        return self


def by_name(*built_in: str) -> Discriminator:
    """Chooses a section's class by its `name`; the first is meant where there is none."""

    def tag(value: Any) -> str:
        name = value.get("name", built_in[0]) if isinstance(value, Mapping) else getattr(value, "name", built_in[0])
        return name if name in built_in else PLUGIN

    return Discriminator(tag)


def _name_alone(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


NAME_ALONE = BeforeValidator(_name_alone)
"""Lets a user write `advantage: rloo` for `advantage: {name: rloo}`."""
