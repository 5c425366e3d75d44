"""A command that consists of others: hands the rest of the line to the module of the one that is asked for."""

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module


def dispatch(
    prog: str,
    description: str,
    commands: Mapping[str, tuple[str, str]],
    argv: Sequence[str] | None,
    *,
    called: str = "command",
    version: str | None = None,
) -> int:
    """Runs the command that the first argument names; returns its exit code.

    Args:
        prog: what a user types to get here.
        commands: by name, the module, which has `command(argv) -> exit code`, and what it does.
        argv: None: that of this process.
        called: what the help calls a command.
        version: what `--version` tells, if it is an option.
    """
    width = max(map(len, commands))
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="\n".join(f"  {name:<{width}}  {purpose}" for name, (_, purpose) in commands.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if version is not None:
        parser.add_argument("--version", action="version", version=f"{prog} {version}")
    parser.add_argument(called, choices=commands, help=f"see below; `{prog} {called.upper()} --help` tells more")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=f"arguments of the {called}")
    parsed = parser.parse_args(argv)
    module, _ = commands[getattr(parsed, called)]
    code: int = import_module(module).command(parsed.arguments)
    return code
