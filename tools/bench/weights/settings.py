"""The configuration of a run that only moves weights."""

import socket
from pathlib import Path
from typing import Any

from slipstream.configs import RunConfig

DEADLINE_S = 120.0


def settings(folder: Path, name: str, **sections: Any) -> RunConfig:
    """A run called `name` on free ports of this host; `sections` go before what stands here."""
    weights = {
        "control_port": _free_port(),
        "store_port": _free_port(),
        "stream_port": _free_port(),
        "deadline_s": DEADLINE_S,
        "folder": str(folder / name),
        "verify": False,
    }
    return RunConfig.model_validate(
        {"run": {"name": name, "dir": str(folder)}, "model": {"build": "digits"}}
        | sections
        | {"weights": weights | sections.get("weights", {})}
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
