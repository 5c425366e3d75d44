"""Runs without `slipstream up`: their processes are forked, except what a test starts by itself."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from multiprocessing import active_children
from multiprocessing.context import ForkServerContext
from pathlib import Path

from slipstream.buffer.wire.codec import decode_group
from slipstream.buffer.wire.messages import Group
from slipstream.configs import RunConfig
from slipstream.configs.load import create_run_folder, load_config
from slipstream.learner.data.buffer_feed import StepData, build_step, partition_groups
from slipstream.learner.data.prefix_tree import PrefixSharing
from slipstream.tools.launch.redis import redis_command, wait_until_ready
from slipstream.tools.ledger.open import OpenLedger, with_ledger
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


def trained_groups(run: Path) -> list[list[Group]]:
    """The groups of each step of a finished run, in the order in which they were leased."""
    steps: list[list[Group]] = []

    async def read(opened: OpenLedger) -> int:
        ids = await opened.reader.ids("durable")
        records = [record for record in await opened.reader.groups(ids) if record is not None]
        for _, of_step in groupby(records, key=lambda record: record.steps[-1]):
            steps.append([decode_group(record.blob) for record in of_step if record.blob is not None])
        return 0

    assert with_ledger(str(run), read) == 0
    return steps


def step_of(groups: list[Group], config: RunConfig, step: int, sharing: PrefixSharing | None = None) -> StepData:
    """A step of one rank on these groups, in a run that publishes each version; common prefixes by the rule."""
    updates = partition_groups(len(groups), updates=config.learner.updates_per_step, rank=0, world_size=1)
    return build_step(
        [[(groups[index], 1.0) for index in update] for update in updates],
        algorithms=config.algorithms,
        rewards=config.rewards,
        step=step,
        consuming_version=step,
        sharing=sharing,
    )
