"""Finds a run and opens its ledger: in its own Redis if that answers, else in a copy of the data in the run folder."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import redis.exceptions
from redis.exceptions import RedisError

from slipstream.buffer.identity import require_same_identity
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.reader import LedgerReader
from slipstream.buffer.store.redis import connect, connect_async, redis_error
from slipstream.buffer.store.spill import SpillFolder
from slipstream.configs import RunConfig
from slipstream.configs.load import load_config
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.schema.buffer import RedisConfig
from slipstream.tools.launch.redis import ping_problem, served_copy

RUNS = Path("runs")
COMMAND_DEADLINE_S = 120.0
"""Checks of a whole ledger take longer than the commands of a run."""
RUN_HELP = "the run's folder, its name under runs/, or a configuration file of it; default: the latest in runs/"


@dataclass(frozen=True)
class OpenLedger:
    """A run's ledger, open for reading."""

    name: str
    config: RunConfig
    folder: RunPaths
    live: bool
    """True: the run's own Redis; False: a copy."""
    identity: dict[str, str]
    ledger: Ledger
    reader: LedgerReader


def with_ledger(run: str | None, work: Callable[[OpenLedger], Awaitable[int]]) -> int:
    """Opens the ledger of a run and returns the result of `work` on it.

    Raises: ConfigError when there is no such run, SlipstreamError when its ledger can't be read.
    """
    folder, config = find_run(run)
    if not config.uses_buffer:
        raise SlipstreamError(
            f"run {config.run.name} has no ledger: a training of the kind {config.learner.trainer.name} has no buffer"
        )
    with _reachable(folder, config.redis, run=config.run.name) as (reached, live):

        async def open_and_work() -> int:
            deadline_s = max(COMMAND_DEADLINE_S, reached.deadline_s)
            async with connect_async(reached.model_copy(update={"deadline_s": deadline_s})) as client:
                ledger = Ledger(client, config)
                identity = await ledger.identity()
                if not identity:
                    raise SlipstreamError(
                        f"Redis at {config.redis.address} holds nothing of run {config.run.name!r}: it has not begun "
                        "yet, or Redis was flushed"
                    )
                require_same_identity(config, identity)
                reader = LedgerReader(client, config.run.name, SpillFolder(folder.spill))
                return await work(OpenLedger(config.run.name, config, folder, live, identity, ledger, reader))

        try:
            return asyncio.run(open_and_work())
        except RedisError as error:
            raise redis_error(reached, error) from error


def find_run(run: str | None) -> tuple[RunPaths, RunConfig]:
    """The run's folder and configuration.

    Raises: ConfigError when there is no such run.
    """
    if run is not None and Path(run).is_file():
        config = load_config(Path(run))
        if not config.paths.config.is_file():
            return config.paths, config
        folder = config.paths  # its own configuration has the ports that were chosen for the run
    else:
        folder = find_folder(run)
    if not folder.config.is_file():
        raise ConfigError(
            f"{folder.root} holds no config.yaml, so it is no run's folder; name one, or a configuration file"
        )
    try:
        return folder, load_config(folder.config)
    except ConfigError as error:  # written by another release
        raise ConfigError([f"{folder.config}: {problem}" for problem in error.problems]) from None


def find_folder(run: str | None) -> RunPaths:
    """The run's folder, whatever it holds.

    Raises: ConfigError when there is no such folder.
    """
    if run is None:
        root = _latest()
    elif Path(run).is_file():
        root = load_config(Path(run)).paths.root
    else:
        root = Path(run) if Path(run).is_dir() else RUNS / run
        if not root.is_dir():
            known = ", ".join(sorted(config.parent.name for config in RUNS.glob("*/config.yaml")))
            raise ConfigError(f"there is no run {run!r}; runs in {RUNS.resolve()}: {known or 'none'}")
    return RunPaths(root)


def _latest() -> Path:
    configs = sorted(RUNS.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise ConfigError(f"there is no run in {RUNS.resolve()}; name the run's folder or its configuration file")
    return configs[-1].parent


@contextlib.contextmanager
def _reachable(folder: RunPaths, config: RedisConfig, *, run: str) -> Iterator[tuple[RedisConfig, bool]]:
    """The Redis that holds the ledger, and whether it is the run's own."""
    if config.url is None:
        # Without data of an embedded server, a server at its port may have been started by hand for the run.
        if _serves(config, folder.redis) or not (folder.redis.exists() or ping_problem(config)):
            yield config, True
        else:
            with served_copy(folder.redis) as copy:
                yield copy, False
        return
    if folder.name != run:
        raise SlipstreamError(
            f"{folder.root} was moved aside: Redis forgot its ledger when run {run!r} was started over"
        )
    reason = ping_problem(config)
    if not reason:
        yield config, True
    elif folder.redis.exists():  # of an embedded server, which a job of a cluster had and took with it
        with served_copy(folder.redis) as copy:
            yield copy, False
    else:
        raise SlipstreamError(
            f"Redis at {config.address} does not answer: {reason}; start it, or correct redis.url in the run's "
            "configuration"
        )


def _serves(config: RedisConfig, data: Path) -> bool:
    """True if the server at the embedded server's port serves this data: it may be another run's.

    Raises: SlipstreamError when the server refuses the password.
    """
    try:
        with connect(config) as client:
            served: dict[str, str | bytes] = client.config_get("dir")
    except redis.exceptions.AuthenticationError as error:
        raise redis_error(config, error) from error
    except redis.exceptions.RedisError:
        return False
    folder = served.get("dir", "")
    return Path(folder.decode() if isinstance(folder, bytes) else folder) == data.resolve()
