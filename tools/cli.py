"""The console script `slipstream`."""

import sys
from collections.abc import Sequence

from slipstream.configs.arguments import report_problems
from slipstream.configs.errors import ConfigError, SlipstreamError
from slipstream.tools.commands import dispatch

COMMANDS = {
    "up": ("slipstream.tools.up", "run everything on this machine and watch it learn"),
    "summary": ("slipstream.tools.report", "show a finished run's figures and redraw its picture"),
    "ledger": ("slipstream.tools.ledger.cli", "check, show and export the groups of a run"),
    "bench": ("slipstream.tools.bench.cli", "measure the buffer, the weights, and what staleness does to learning"),
    "conform": ("slipstream.tools.conform.cli", "hold the algorithms against reference figures"),
    "keys": ("slipstream.tools.keys", "make the keys that encrypt a run's connections"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exits 2 on mistakes in the command line or the configuration, with one line for each."""
    try:
        code = dispatch("slipstream", "Asynchronous reinforcement learning for language models.", COMMANDS, argv)
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
