"""The console script `slipstream`: finds the command and hands the rest of the line to its module."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from slipstream.configs.arguments import report_problems
from slipstream.configs.errors import ConfigError, SlipstreamError

COMMANDS = {
    "up": ("slipstream.tools.up", "run everything on this machine and watch it learn"),
    "summary": ("slipstream.tools.report", "show a finished run's figures and redraw its picture"),
    "ledger": ("slipstream.tools.ledger.cli", "check, show and export the groups of a run"),
    "bench": ("slipstream.tools.bench", "measure the buffer, the weights, and what staleness does to learning"),
    "conform": ("slipstream.tools.conform", "hold the algorithms against reference figures"),
    "keys": ("slipstream.tools.keys", "make the keys that encrypt a run's connections"),
}
"""Each command's module, which has `command(argv) -> exit code`, and what it does."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exits 2 on mistakes in the command line or the configuration, with one line for each."""
    parser = argparse.ArgumentParser(
        prog="slipstream",
        description="Asynchronous reinforcement learning for language models.",
        epilog="\n".join(f"  {name:<9} {purpose}" for name, (_, purpose) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, help="see below; `slipstream COMMAND --help` tells more")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")
    parsed = parser.parse_args(argv)
    module, _ = COMMANDS[parsed.command]
    try:
        code: int = import_module(module).command(parsed.arguments)
    except ConfigError as error:
        report_problems(error)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
