"""What is wrong with a configuration."""

from pathlib import Path

import pytest

from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError


def problems_of(path: Path, *overrides: str) -> tuple[str, ...]:
    """Every mistake that the loader names."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems
