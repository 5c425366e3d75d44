"""A run's processes, forked from one that has imported torch and vLLM already: that takes them seconds each."""

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.context import ForkServerContext, ForkServerProcess

from slipstream.rollout_servers.engines.vllm.arguments import prepare_environment

PRELOADED = [
    "torch",
    "transformers",
    "vllm.v1.engine.llm_engine",
    "slipstream.buffer.cli",
    "slipstream.learner.assemble",
    "slipstream.rollout_servers.engines.vllm.inline",
    "slipstream.rollout_servers.server",
]
DEADLINE_S = 120.0


def fork_server() -> ForkServerContext:
    """Starts the process that the others are forked from."""
    prepare_environment(gpu=False)  # vLLM reads it when it is imported
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
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


def call_main(module: str, arguments: list[str]) -> None:
    """What `python -m module arguments` would do."""
    sys.argv = [module, *arguments]
    import_module(module).main()
