"""The command line of every process of a run, `CONFIG [key.path=value ...] [--print-config]`, and its log."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.configs.load import dump_config, load_config
from slipstream.configs.paths import RunPaths, unwritable_error
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.files import run_with_stdout
from slipstream.configs.runtime.logging import configure_logging, log_crashes
from slipstream.configs.schema import RunConfig


def run_parser(description: str, *, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser with the shared arguments, for commands that add their own."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of the run")
    # default: without one, argparse counts them among what is required when CONFIG is missing.
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.path=value", help="change one key; the value is read as YAML"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    return parser


def add_undo_steps(parser: argparse.ArgumentParser) -> None:
    """Adds `--undo-steps` of the learner and of `slipstream up`."""
    parser.add_argument(
        "--undo-steps",
        action="store_true",
        help="train again the steps that a checkpoint of the run contains, but none in this run folder does",
    )


def add_until_finished(parser: argparse.ArgumentParser) -> None:
    """Adds `--until-finished` of the buffer and of rollout servers."""
    parser.add_argument(
        "--until-finished",
        action="store_true",
        help="exit once the run is finished: its folder, which must be the learner's, has summary.json",
    )


def read_run_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> tuple[argparse.Namespace, RunConfig]:
    """Parses with a `run_parser`; options may stand between the overrides.

    Raises: SystemExit with 0 after `--print-config` or `--help`; with 2 after all mistakes of the command line and the
        configuration were written to stderr.
    """
    _reserve_stderr()
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
    except ConfigError as error:
        report_problems(error)
        sys.exit(2)
    if arguments.print_config:
        text = dump_config(config)
        sys.exit(run_with_stdout(lambda: _print(text)))
    return arguments, config


def start_log(paths: RunPaths, process: str, *, level: str, **fields: str) -> None:
    """Sends this process's logs and crashes to stderr and the run's folder; arguments as in `configure_logging`.

    Raises: SystemExit with 2 when the folder can't be written to.
    """
    try:
        configure_logging(process, level=level, folder=paths.logs, **fields)
    except OSError as error:
        report_problems(unwritable_error(paths, error))
        sys.exit(2)
    log_crashes()


def report_problems(error: ConfigError) -> None:
    """Writes each problem to stderr, on a line of its own."""
    for problem in error.problems:
        sys.stderr.write(f"error: {problem}\n")


def exit_code(command: Callable[[], int]) -> int:
    """Runs a command; returns its exit code.

    Errors are written to stderr: ConfigError is 2, another SlipstreamError 1. Ctrl-C is 130.
    """
    try:
        return command()
    except ConfigError as error:
        report_problems(error)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SlipstreamError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _print(text: str) -> int:
    sys.stdout.write(text)
    return 0


def _reserve_stderr() -> None:
    """Opens /dev/null as stderr if that is closed.

    Otherwise its file number goes to another file, such as a socket, into which C libraries then write messages.
    """
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
