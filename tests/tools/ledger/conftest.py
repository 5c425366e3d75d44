"""Runs with a folder and a ledger, and the command line that looks into them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.load import create_run_folder
from slipstream.tools.launch.redis import redis_command, wait_until_ready
from tests.tools.ledger.runs import CommandLine, on, play

MakeRun = Callable[..., RunConfig]


@pytest.fixture
def ledger(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def make_run(redis_url: str, run_name: str, tmp_path: Path) -> MakeRun:
    """A run's configuration, in a folder of its own; keyword arguments replace settings of `buffer`."""

    def make(*, redis: object = None, **buffer: object) -> RunConfig:
        config = RunConfig.model_validate(
            {
                "run": {"name": run_name, "dir": str(tmp_path / "runs")},
                "model": {"build": "digits"},
                "redis": redis or {"url": redis_url},
                "rollout": {"group_size": 2},
                "learner": {"groups_per_step": 2},
                "buffer": {"max_staleness": 20, **buffer},
            }
        )
        create_run_folder(config.paths, config)
        return config

    return make


@pytest.fixture
def played(make_run: MakeRun) -> RunConfig:
    """A run that is going on, see `play`."""
    config = make_run()
    on(config, lambda redis, ledger: play(redis, ledger, config))
    return config


@contextmanager
def embedded(config: RunConfig) -> Iterator[Popen[bytes]]:
    """The run's embedded server; killed at the end, as by a crash."""
    with Popen(redis_command(config), stdout=DEVNULL, stderr=DEVNULL) as server:
        try:
            wait_until_ready(config.redis, 60)
            yield server
        finally:
            server.kill()
