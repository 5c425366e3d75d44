"""The demo's file, and the problems that the loader reports."""

from pathlib import Path

import pytest

from slipstream.configs import load
from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError

DEMO = Path(load.__file__).parent / "demo.yaml"


def problems_of(path: Path, *overrides: str) -> tuple[str, ...]:
    """Every problem of a configuration."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def require_problem(parts: str, *overrides: str, path: Path = DEMO) -> None:
    """Requires exactly one problem, which names all the parts, given as one text with blanks between them."""
    (problem,) = problems_of(path, *overrides)
    missing = [part for part in parts.split() if part not in problem]
    assert not missing, f"{problem!r} lacks {missing}"
