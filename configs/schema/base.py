"""Base classes and types of configuration sections."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from slipstream.configs.registry import Registry
from slipstream.configs.runtime.errors import ConfigError

MAX_INTEGER = 2**62
Seconds = Annotated[float, Field(gt=0, le=1e6)]
"""A duration of at most eleven days: from 24 days on, 32-bit counters of milliseconds overflow."""


def expand_home(path: Path) -> Path:
    """Replaces `~` by the home directory. Raises: ValueError when there is none."""
    # A shell does not expand `~` behind `key=`, and a folder named `~` is dangerous to remove.
    try:
        return path.expanduser()
    except RuntimeError as error:  # no such user, or one without a home
        raise ValueError(str(error)) from None


UserPath = Annotated[Path, AfterValidator(expand_home)]
"""A path in which `~` is the home directory."""


class Section(BaseModel):
    """A frozen block of keys; an unknown key is an error, never ignored."""

    # hide_input_in_errors: a misplaced value may be a password.
    # allow_inf_nan: an infinite deadline is a hang. Options of plug-ins may hold any number.
    # ser_json_inf_nan: infinity must survive in the resolved configuration that the processes read.
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
    def _number_types(cls, given: Any) -> Any:
        """Refuses booleans for numbers, which pydantic converts, and integers that don't fit into 64 bits."""
        for key, value in given.items() if isinstance(given, Mapping) else ():
            kinds = set(_kinds(cls.model_fields[key].annotation)) if key in cls.model_fields else set()
            if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
                raise ValueError(f"{key} should be a number, not {str(value).lower()}")
            if isinstance(value, int) and value > MAX_INTEGER and int in kinds:
                raise ValueError(f"{key} should be less than or equal to {MAX_INTEGER} (given: {value})")
        return given


def _kinds(annotation: Any) -> Iterable[Any]:
    """The types in an annotation, nested ones included."""
    arguments = get_args(annotation)
    return [kind for argument in arguments for kind in _kinds(argument)] if arguments else [annotation]


def sections_at(key: str, sections: Iterable[type[BaseModel]]) -> list[type[BaseModel]]:
    """The section classes that a key of these sections may hold."""
    fields = [section.model_fields[key] for section in sections if key in section.model_fields]
    return [inner for field in fields for inner in sections_in(field.annotation)]


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The section classes inside an annotation such as `X`, `X | None` or `tuple[X | Y, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


PLUGIN: Final = "plugin"
"""Tag of a section whose name is not built in."""


class NamedSection(Section):
    """A section whose name chooses a function, and whose other fields, but for the shared ones, are its arguments."""

    shared: ClassVar[frozenset[str]] = frozenset({"name"})
    """Fields that are not arguments of the function."""
    target: ClassVar[str]
    """`module:attribute` of a built-in function."""

    name: str

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the function."""
        return {field: getattr(self, field) for field in type(self).model_fields if field not in self.shared}


class PluginSection(NamedSection):
    """A section that names a plug-in function."""

    registry: ClassVar[Registry]
    """The functions of its kind."""

    name: str
    """An installed entry point, or `module:attribute`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the function."""
        return self.options

    @model_validator(mode="after")
    def _is_installed(self) -> Self:
        try:
            self.registry.resolve(self.name)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


def names_of(section: type[BaseModel]) -> tuple[str, ...]:
    """Values of the key `name` that choose a section."""
    field = section.model_fields.get("name")
    if field is not None and get_origin(field.annotation) is Literal:
        return get_args(field.annotation)
    return (PLUGIN,) if issubclass(section, PluginSection) else ()


def registry_of(kind: str, *built_in: type[NamedSection]) -> Registry:
    """The functions of these sections."""
    return Registry(kind, {name: section.target for section in built_in for name in names_of(section)})


def one_of(*sections: type[NamedSection]) -> Any:
    """Annotation of a key that holds one of these sections, by `name`: the first by default, the last for plug-ins.

    `advantage: rloo` stands for `advantage: {name: rloo}`.
    """
    names = [name for section in sections for name in names_of(section)]

    def tag(value: Any) -> str:
        name = value.get("name", names[0]) if isinstance(value, Mapping) else getattr(value, "name", names[0])
        return name if name in names else PLUGIN

    tagged = [Annotated[section, Tag(name)] for section in sections for name in names_of(section)]
    return Annotated[Union[tuple(tagged)], Discriminator(tag), BeforeValidator(_name_alone)]  # noqa: UP007


def _name_alone(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value
