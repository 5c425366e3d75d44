"""What every section of the configuration shares."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator

from slipstream.configs.plugins import resolve_plugin
from slipstream.configs.runtime.errors import ConfigError

MOST = 2**62
Seconds = Annotated[float, Field(gt=0, le=1e6)]
"""How long something may take: eleven days at most. From 24 on, who counts in milliseconds fails or does not wait."""


def expand_home(path: Path) -> Path:
    """The path, with the home directory for `~`. Raises: ValueError when there is none."""
    # Behind `key=` a shell leaves `~` as it is, and a folder of that name is easily made, but not safely removed.
    try:
        return path.expanduser()
    except RuntimeError as error:  # no such user, or one without a home
        raise ValueError(str(error)) from None


UserPath = Annotated[Path, AfterValidator(expand_home)]
"""A path as a user writes it: `~/models` lies in the home directory."""


class Section(BaseModel):
    """A frozen block of keys; an unknown key is an error, never ignored."""

    # hide_input_in_errors: what is given in the wrong place may be a password.
    # allow_inf_nan: a deadline that never comes is a hang. What options of plug-ins hold is their own affair.
    # ser_json_inf_nan: the processes of a run read what was written, and null is another value than infinity.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_switch_for_a_number_and_none_too_large(cls, given: Any) -> Any:
        """pydantic takes true for 1; and messages, Redis and torch have 64 bits for a whole number."""
        for key, value in given.items() if isinstance(given, Mapping) else ():
            kinds = set(_kinds(cls.model_fields[key].annotation)) if key in cls.model_fields else set()
            if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
                raise ValueError(f"{key} should be a number, not {str(value).lower()}")
            if isinstance(value, int) and value > MOST and int in kinds:
                raise ValueError(f"{key} should be less than or equal to {MOST} (given: {value})")
        return given


def _kinds(annotation: Any) -> Iterable[Any]:
    """The types that a value may have, by itself or inside of another."""
    arguments = get_args(annotation)
    return [kind for argument in arguments for kind in _kinds(argument)] if arguments else [annotation]


def sections_at(key: str, sections: Iterable[type[BaseModel]]) -> list[type[BaseModel]]:
    """The section classes that the key of one of these sections may hold."""
    fields = [section.model_fields[key] for section in sections if key in section.model_fields]
    return [inner for field in fields for inner in sections_in(field.annotation)]


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The section classes inside an annotation such as `X`, `X | None` or `tuple[X | Y, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


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
            resolve_plugin(self.kind, self.name, self.built_in)
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
