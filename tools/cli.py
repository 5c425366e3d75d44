"""The console script `slipstream`."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream.configs.imports import end_on_ctrl_c
from slipstream.configs.printing import printed
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
    sys.exit(printed(lambda: _run(argv)))


def _run(argv: Sequence[str] | None) -> int:
    with _ctrl_c_is_quiet():
        from importlib.metadata import version

        from slipstream.configs.arguments import report_problems
        from slipstream.configs.errors import ConfigError, SlipstreamError
    try:
        _require_working_directory()
        return dispatch(
            "slipstream",
            "Asynchronous reinforcement learning for language models.",
            COMMANDS,
            argv,
            version=version("slipstream"),
        )
    except ConfigError as error:
        report_problems(error)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _require_working_directory() -> None:
    """Raises: ConfigError when somebody has deleted it: neither relative paths nor torch can do without."""
    from slipstream.configs.errors import ConfigError

    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the working directory was deleted; change to another one") from None


@contextmanager
def _ctrl_c_is_quiet() -> Iterator[None]:
    """Around imports that take most of a second."""
    heard = signal.getsignal(signal.SIGINT)
    end_on_ctrl_c()
    yield
    signal.signal(signal.SIGINT, heard)


if __name__ == "__main__":
    main()
