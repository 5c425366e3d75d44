"""`slipstream plugins`: the envs, tools, rewards, trainers, advantages and losses that a configuration can name."""

import argparse
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from slipstream.configs.registry import InstalledPlugin, Registry
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.advantages import ADVANTAGES
from slipstream.configs.schema.base import NamedSection, names_of, sections_at
from slipstream.configs.schema.losses import LOSSES
from slipstream.configs.schema.trainers import TRAINERS
from slipstream.env.adapters.base import PACKAGES, missing_package
from slipstream.env.registry import ENVS, TOOLS
from slipstream.rewards.registry import REWARDS
from slipstream.tools.cli import table_console

REGISTRIES: Final = {registry.kind: registry for registry in (ENVS, TOOLS, REWARDS, TRAINERS, ADVANTAGES, LOSSES)}
MIN_COLUMNS = 100
LONGEST_DEFAULT = 60


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream plugins`; returns 1 if an installed plug-in can't be used, else 0."""
    parser = argparse.ArgumentParser(
        prog="slipstream plugins",
        description="List the plug-ins that a configuration can name: those that ship with the project, and the entry "
        "points of installed packages (groups slipstream.envs, .tools, .rewards, .trainers, .advantages, .losses). Any "
        "other one can be named as module:attribute.",
    )
    parser.add_argument("--kind", choices=REGISTRIES, help="only plug-ins of this kind")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args(argv)
    kinds = [arguments.kind] if arguments.kind else REGISTRIES
    described = [plugin for kind in kinds for plugin in plugins(REGISTRIES[kind])]
    if arguments.json:
        print(
            json.dumps(
                [
                    {**asdict(entry.plugin), "description": entry.description, "options": entry.options}
                    for entry in described
                ],
                indent=2,
            )
        )
    else:
        table_console(min_width=MIN_COLUMNS).print(_table(described))
    return 1 if any(entry.plugin.problem and entry.plugin.target for entry in described) else 0


@dataclass(frozen=True)
class Described:
    """A plug-in with its documentation.

    Attributes:
        description: the first paragraph of its docstring.
        options: see `options_of`.
    """

    plugin: InstalledPlugin
    description: str
    options: Mapping[str, str]


def plugins(registry: Registry) -> Iterator[Described]:
    """The built-in plug-ins of a kind, then those of installed packages."""
    kind = registry.kind
    for name in registry.built_in:
        absent = kind == "env" and name in PACKAGES and find_spec(PACKAGES[name]) is None
        plugin = InstalledPlugin(kind, name, "", "slipstream", missing_package(name) if absent else "")
        yield _described(plugin, _built_in(registry, name))
    for plugin in registry.installed():
        yield _described(plugin, None if plugin.problem else registry.load(plugin.target))


def _built_in(registry: Registry, name: str) -> Any:
    """The class or function; of a trainer, an advantage or a loss its section of the configuration."""
    sections = sections_at(registry.kind, sections_at("learner", [RunConfig]))
    return next((section for section in sections if name in names_of(section)), None) or registry.load(name)


def _described(plugin: InstalledPlugin, implementation: Any) -> Described:
    paragraph = (inspect.getdoc(implementation) or "").partition("\n\n")[0].replace("\n", " ")
    description = paragraph.partition(" Raises: ")[0]
    return Described(plugin, description, options_of(plugin.kind, implementation))


def options_of(kind: str, implementation: Any) -> dict[str, str]:
    """Options of a plug-in with their defaults as in YAML; empty for a required one."""
    if isinstance(implementation, type) and issubclass(implementation, NamedSection):
        fields = {name: field for name, field in implementation.model_fields.items() if name != "name"}
        return {name: "" if option.is_required() else _yaml(option.get_default()) for name, option in fields.items()}
    if (
        not callable(implementation)
        or kind == "trainer"
        or (kind in ("tool", "reward") and not isinstance(implementation, type))
    ):
        return {}  # functions of these kinds have none, and trainers read theirs when they are built
    try:
        parameters = list(inspect.signature(implementation).parameters.values())
    except ValueError:  # some built-in callables have no signature
        return {}
    if kind in ("advantage", "loss"):
        parameters = parameters[1:]  # the first is the input
    named = [option for option in parameters if option.kind not in (option.VAR_KEYWORD, option.VAR_POSITIONAL)]
    return {option.name: "" if option.default is option.empty else _yaml(option.default) for option in named}


def listed(options: Mapping[str, str]) -> str:
    """Options with their defaults, on one line."""
    return ", ".join(f"{name}={default}" if default else f"{name} (required)" for name, default in options.items())


def _yaml(default: object) -> str:
    """A default in YAML; `…` for one that is too long, or made at each call."""
    try:
        text = json.dumps(default, ensure_ascii=False)
    except TypeError:
        return "…"
    return text if len(text) <= LONGEST_DEFAULT else "…"


def _table(plugins: Sequence[Described]) -> Table:
    table = Table(border_style="cyan")
    table.add_column("kind", no_wrap=True)
    table.add_column("name", style="bold cyan", no_wrap=True)
    table.add_column("what it is, and its options", overflow="fold")
    for described in plugins:
        plugin, text = described.plugin, Text(described.description)
        if described.options:
            options = [
                f"{name}={default}" if default else f"{name} (required)" for name, default in described.options.items()
            ]
            text += Text(f"\noptions: {', '.join(options)}", style="dim")
        if plugin.target:
            text += Text(f"\nfrom {plugin.package}: {plugin.target}", style="dim")
        if plugin.problem:
            text += Text(f"\nnot usable: {plugin.problem}", style="red")
        table.add_row(plugin.kind, plugin.name, text)
        table.add_section()
    return table
