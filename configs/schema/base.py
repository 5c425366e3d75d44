"""What every section of the configuration shares."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen block of keys; an unknown key is an error, never ignored."""

    # hide_input_in_errors: what is given in the wrong place may be a password.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)
