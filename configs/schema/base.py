"""What every section of the configuration shares."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen block of keys; an unknown key is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
