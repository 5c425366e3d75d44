"""`slipstream plugins`: the envs, tools, rewards, trainers, advantages and losses that a configuration can name."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec

from rich.table import Table
from rich.text import Text

from slipstream.configs.plugins import InstalledPlugin, installed_plugins
from slipstream.configs.schema.algorithms import BUILT_IN_ADVANTAGES, BUILT_IN_LOSSES
from slipstream.configs.schema.learner import BUILT_IN_TRAINERS
from slipstream.env.adapters.base import PACKAGES, missing_package
from slipstream.env.registry import BUILT_IN as BUILT_IN_ENVS
from slipstream.env.registry import BUILT_IN_TOOLS
from slipstream.rewards.registry import BUILT_IN as BUILT_IN_REWARDS
from slipstream.tools.cli import table_console

BUILT_IN: Mapping[str, Sequence[str]] = {
    "env": tuple(BUILT_IN_ENVS),
    "tool": tuple(BUILT_IN_TOOLS),
    "reward": tuple(BUILT_IN_REWARDS),
    "trainer": BUILT_IN_TRAINERS,
    "advantage": BUILT_IN_ADVANTAGES,
    "loss": BUILT_IN_LOSSES,
}
"""Names by kind."""
MIN_COLUMNS = 100


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream plugins`; returns 1 if an installed plug-in can't be used, else 0."""
    parser = argparse.ArgumentParser(
        prog="slipstream plugins",
        description="List the plug-ins that a configuration can name: those that ship with the project, and the entry "
        "points of installed packages (groups slipstream.envs, .tools, .rewards, .trainers, .advantages, .losses). Any "
        "other one can be named as module:attribute.",
    )
    parser.add_argument("--kind", choices=BUILT_IN, help="only plug-ins of this kind")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args(argv)
    found = [plugin for kind in BUILT_IN if arguments.kind in (None, kind) for plugin in plugins(kind)]
    if arguments.json:
        print(json.dumps([asdict(plugin) for plugin in found], indent=2))
    else:
        table_console(min_width=MIN_COLUMNS).print(_table(found))
    return 1 if any(plugin.problem and plugin.target for plugin in found) else 0


def plugins(kind: str) -> Iterator[InstalledPlugin]:
    """The built-in plug-ins of a kind, then those of installed packages."""
    for name in BUILT_IN[kind]:
        absent = kind == "env" and name in PACKAGES and find_spec(PACKAGES[name]) is None
        yield InstalledPlugin(kind, name, "", "slipstream", missing_package(name) if absent else "")
    yield from installed_plugins(kind, BUILT_IN[kind])


def _table(found: Sequence[InstalledPlugin]) -> Table:
    table = Table(border_style="cyan")
    table.add_column("kind", no_wrap=True)
    table.add_column("name", style="bold cyan", no_wrap=True)
    table.add_column("from")
    table.add_column("usable", overflow="fold")
    for plugin in found:
        origin = f"{plugin.package}{os.linesep}{plugin.target}" if plugin.target else plugin.package
        status = Text(plugin.problem, style="red") if plugin.problem else Text("yes")
        table.add_row(plugin.kind, plugin.name, Text(origin), status)
    return table
