"""A run's processes, forked from one that has imported torch and vLLM already: that takes them seconds each."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path

from slipstream.rollout_servers.engines.vllm.arguments import prepare_environment

DEADLINE_S = 120.0


def fork_server() -> ForkServerContext:
    """Starts the process that the others are forked from."""
    prepare_environment(gpu=False)  # vLLM reads it when it is imported
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.pipeline.preloaded"])
    ensure_running()  # not only with the first process, whose test may check for folders that it leaves
    return context


@contextmanager
def running(context: ForkServerContext, module: str, arguments: Sequence[str]) -> Iterator[ForkServerProcess]:
    """A command line's process, ended at the end."""
    process = context.Process(target=call_main, args=(module, list(arguments)), name=module)
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join(DEADLINE_S)
        if process.is_alive():
            process.kill()
            process.join()


class Forked:
    """A command line's process, which is handled as subprocess's are."""

    def __init__(self, context: ForkServerContext, module: str, arguments: Sequence[str], output: Path) -> None:
        """Starts it; all that it prints goes to `output`."""
        self._process = context.Process(target=call_main, args=(module, list(arguments), output), name=module)
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises: TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens if it has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """With SIGKILL."""
        self._process.kill()


def run_to_end(
    context: ForkServerContext, module: str, *arguments: object, output: Path, deadline_s: float = 2 * DEADLINE_S
) -> None:
    """A command line's process, which must end with 0; all that it prints goes to `output`."""
    process = Forked(context, module, [*map(str, arguments)], output)
    try:
        code = process.wait(deadline_s)
    finally:
        process.kill()
    assert code == 0, output.read_text()[-4000:]


def call_main(module: str, arguments: list[str], output: Path | None = None) -> None:
    """Runs a module as `python -m module arguments` does."""
    if output is not None:
        with output.open("wb") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv = [module, *arguments]
    import_module(module).main()
