"""Sections that are chosen by their name: one class for each built-in, one for all plug-ins."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

from pydantic import BeforeValidator, Discriminator, Field, model_validator

from slipstream.configs.errors import ConfigError
from slipstream.configs.plugins import place_of
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
        try:
            place_of(self.kind, self.name, self.built_in)
        except ConfigError as error:
            raise ValueError(str(error)) from None
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
