"""Models that bring code of their own in their folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.configs.errors import ConfigError


@contextmanager
def without_own_code(model: Path) -> Iterator[None]:
    """Around what transformers loads from `model` with `trust_remote_code=False`; left out, it would ask the terminal.

    Raises: ConfigError when it can't be loaded without that code.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            f"the model in {model} needs code from its folder, which slipstream does not run: the processes would have "
            "to run the same; choose a model that transformers has a class for"
        ) from None
