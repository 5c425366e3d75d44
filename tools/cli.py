"""The console script `slipstream`."""

import argparse
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from slipstream.configs.runtime.files import printed
from slipstream.configs.runtime.signals import end_on_ctrl_c


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


COMMANDS = {
    "up": ("slipstream.tools.launch.up", "run everything on this machine and watch it learn"),
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
        from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
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
    from slipstream.configs.runtime.errors import ConfigError

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
