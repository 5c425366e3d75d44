"""What every section of the configuration shares."""

from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict


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


def sections_at(key: str, sections: Iterable[type[BaseModel]]) -> list[type[BaseModel]]:
    """The section classes that the key of one of these sections may hold."""
    fields = [section.model_fields[key] for section in sections if key in section.model_fields]
    return [inner for field in fields for inner in sections_in(field.annotation)]


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The section classes inside an annotation such as `X`, `X | None` or `tuple[X | Y, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]
