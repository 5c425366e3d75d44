"""Runs without `slipstream up`: their processes are forked, except what a test starts by itself."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import active_children
from multiprocessing.context import ForkServerContext
from pathlib import Path

from slipstream.configs.load import create_run_folder, load_config
from slipstream.tools.launch.redis import redis_command, wait_until_ready
from tests.pipeline.conftest import DEMO, Pipeline, Services
from tests.pipeline.forked import DEADLINE_S, running


@contextmanager
def serving(forks: ForkServerContext, pipeline: Pipeline, *overrides: str, file: Path = DEMO) -> Iterator[Services]:
    """Redis, buffer and rollout server of a configuration; what is started beside them ends with them."""
    arguments = pipeline.arguments(*overrides, file=file)
    config = load_config(file, arguments[1:])
    create_run_folder(config.paths, config)
    with ExitStack() as processes:
        services = processes.enter_context(pipeline.no_services_yet(*overrides, file=file))
        services.spawn(redis_command(config.redis, config.paths.redis))
        wait_until_ready(config.redis, DEADLINE_S)
        for module in ("slipstream.buffer.cli", "slipstream.rollout_servers.cli"):
            processes.enter_context(running(forks, module, arguments))
        yield services


def train(forks: ForkServerContext, pipeline: Pipeline, *overrides: str, file: Path = DEMO) -> int:
    """Runs a configuration to its end; returns the learner's exit code."""
    with (
        serving(forks, pipeline, *overrides, file=file) as services,
        running(forks, "slipstream.learner.cli", services.arguments) as learner,
    ):
        learner.join(DEADLINE_S)
        alive = [process.name for process in active_children()]
        assert learner.exitcode is not None, f"not over after {DEADLINE_S:.0f} s; what lives: {alive}"
        return learner.exitcode
