"""`slipstream bench`: measurements; every part starts what it needs."""

import sys
from collections.abc import Sequence
from importlib import import_module

from slipstream.configs.errors import ConfigError

PARTS = {
    "buffer": "slipstream.tools.bench.buffer",
    "staleness": "slipstream.tools.bench.staleness.cli",
    "weights": "slipstream.tools.bench.weights.cli",
}
"""Each part's module, which has `command(argv) -> exit code`."""


def command(argv: Sequence[str]) -> int:
    """Runs the part that the first argument names.

    Raises: ConfigError when there is no such part.
    """
    if not argv or argv[0] not in PARTS:
        raise ConfigError([f"slipstream bench needs one of {', '.join(PARTS)}, got {' '.join(argv[:1]) or 'nothing'}"])
    code: int = import_module(PARTS[argv[0]]).command(argv[1:])
    sys.stdout.flush()
    return code
