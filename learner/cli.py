"""The console script `learner`: one learner rank, alone or under torchrun.

Imports stand inside the functions: before `main` has set the handler, Ctrl-C would print a traceback.
"""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from slipstream.configs.runtime.signals import GracefulStop, heavy_imports, restore_default_sigint

if TYPE_CHECKING:
    from slipstream.configs import RunConfig
    from slipstream.configs.paths import RunPaths
    from slipstream.learner.trainers.base import Trainer


def main() -> None:
    """Entry point."""
    restore_default_sigint()
    from slipstream.configs.arguments import add_undo_steps, read_run_arguments, report_problems, run_parser, start_log
    from slipstream.configs.paths import LEARNER, hold_run_lock
    from slipstream.configs.runtime.errors import ConfigError
    from slipstream.configs.runtime.logging import get_log
    from slipstream.configs.runtime.network import use_loopback_interface
    from slipstream.configs.runtime.processes import raise_malloc_thresholds, raise_open_file_limit
    from slipstream.configs.runtime.temporary import mark_torchrun_folder, remove_leftovers
    from slipstream.configs.runtime.tracing import start_tracing

    started = float(os.environ.get("SLIPSTREAM_RUN_STARTED", time.monotonic()))
    parser = run_parser("Train with the trainer that learner.trainer names.")
    add_undo_steps(parser)
    arguments, config = read_run_arguments(parser)
    rank = int(os.environ.get("RANK", "0"))
    try:
        # Before anything is written: another learner may use the folder.
        with hold_run_lock(config.paths, by=LEARNER) if rank == 0 else contextlib.nullcontext():
            process = "learner" if rank == 0 else f"learner-{rank}"
            start_log(config.paths, process, level=config.run.log_level)
            start_tracing(config.tracking.trace, config.paths.traces, run=config.run.name, process=process)
            raise_malloc_thresholds()
            raise_open_file_limit()
            use_loopback_interface(config.weights.bind)
            mark_torchrun_folder()
            remove_leftovers()
            if config.paths.summary.exists():  # a service manager may start it once more
                get_log("learner.cli").info("the run is finished", summary=str(config.paths.summary))
                sys.exit(0)
            signals = GracefulStop()
            signals.install()
            training = partial(train, config, signals, started=started, undo_steps=arguments.undo_steps)
            end_process(_exit_code(training, config.paths))
    except ConfigError as error:
        report_problems(error)
        sys.exit(2)


def load(config: "RunConfig") -> "type[Trainer[Any]]":
    """Imports the configured trainer, with torch and transformers: seconds. Raises: ConfigError when it can't be."""
    with heavy_imports():
        from slipstream.learner.trainers.assemble import find_trainer

        return find_trainer(config.learner.trainer)


def train(config: "RunConfig", signals: GracefulStop, *, started: float, undo_steps: bool) -> None:
    """Runs one rank to the end of training. Raises: SlipstreamError, OSError."""
    kind = load(config)
    from slipstream.learner.trainers.assemble import assemble

    with contextlib.ExitStack() as cleanup:
        assemble(kind, config, started=started, cleanup=cleanup, signals=signals, undo_steps=undo_steps).run()


def _exit_code(training: Callable[[], None], paths: "RunPaths") -> int:
    """Trains, logs an error, and returns the exit code."""
    from slipstream.configs.runtime.errors import SlipstreamError
    from slipstream.configs.runtime.logging import get_log

    log = get_log("learner.cli")
    try:
        training()
    except SystemExit as stop:
        log.info("learner stops")
        return stop.code if isinstance(stop.code, int) else 1
    except SlipstreamError as error:
        for problem in error.problems:
            log.error("learner failed", error=problem)
        return error.exit_code
    except OSError as error:  # of the run's files, such as a full disk
        log.error("learner failed", error=f"{error}; see that {paths.root} has room and may be written to")
        return 1
    return 0


def end_process(code: int) -> NoReturn:
    """Ends a process that used gloo: runs exit handlers, but not Python's finalization.

    A gloo thread may still be releasing tensors. It would request the GIL, be terminated by Python in the middle of
    C++, and abort the process.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # redirected to a full disk, or closed
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
