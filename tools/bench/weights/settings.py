"""The configuration of a run that only moves weights."""

from pathlib import Path
from typing import Any

from slipstream.configs import RunConfig
from slipstream.tools.bench.processes import free_port

DEADLINE_S = 120.0


def settings(folder: Path, name: str, **sections: Any) -> RunConfig:
    """A run called `name` on free ports of this host; `sections` go before what stands here."""
    weights = {
        "control_port": free_port(),
        "store_port": free_port(),
        "stream_port": free_port(),
        "deadline_s": DEADLINE_S,
        "folder": str(folder / name),
        "verify": False,
    }
    return RunConfig.model_validate(
        {"run": {"name": name, "dir": str(folder)}, "model": {"build": "digits"}}
        | sections
        | {"weights": weights | sections.get("weights", {})}
    )
