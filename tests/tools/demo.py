"""The demo's configuration."""

from pathlib import Path

from slipstream.configs import RunConfig
from slipstream.configs.load import load_config

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


def configured(folder: Path, *overrides: str) -> RunConfig:
    """With the runs in a folder."""
    return load_config(DEMO, [f"run.dir={folder / 'runs'}", *overrides])
