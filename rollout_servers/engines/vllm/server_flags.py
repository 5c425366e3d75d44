"""vLLM's engine arguments as flags of its server's command line."""

import json
from collections.abc import Mapping
from typing import Any


def command_line_flags(arguments: Mapping[str, Any]) -> list[str]:
    """`{"tensor_parallel_size": 2}` as `--tensor-parallel-size 2`; None leaves a flag out.

    True is `--flag` and False `--no-flag`, a mapping is JSON, and a sequence several words.
    """
    return [word for name, value in arguments.items() for word in _flag(name.replace("_", "-"), value)]


def _flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", json.dumps(value)]
    words = value if isinstance(value, list | tuple) else [value]
    return [f"--{name}", *map(str, words)]
