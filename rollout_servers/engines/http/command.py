"""How an engine's server is started: its command line, its port and its console."""

import json
import os
import random
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.configs.folder import RunFolder
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import EngineError


@dataclass(frozen=True)
class Command:
    """How a server is started.

    Attributes:
        name: stands for it in errors.
        arguments: the command line, without a shell.
        environment: what is added to this process's own.
        port: where it will listen, on loopback.
        health: the path that answers with success once it is ready.
        console: the file that all it prints is appended to.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    port: int
    health: str
    console: Path


def server_command(
    config: RunConfig,
    *,
    name: str,
    python: str,
    module: str,
    flags: Sequence[str],
    environment: Mapping[str, str],
    health: str,
) -> Command:
    """`python -m module` with `flags`, on loopback; its console lies in the run's folder, beside this process's logs.

    Raises: EngineError when `rollout.engine.server_port` is taken.
    """
    port = choose_port(config.rollout.engine.server_port)
    return Command(
        name=name,
        arguments=[python, "-m", module, *flags, "--host", "127.0.0.1", "--port", str(port)],
        environment=environment,
        port=port,
        health=health,
        console=RunFolder.of(config).logs / f"rollout-{socket.gethostname()}-{os.getpid()}-{port}.engine.console",
    )


def command_line_flags(arguments: Mapping[str, Any], *, negatable: bool) -> list[str]:
    """`{"tensor_parallel_size": 2}` as `--tensor-parallel-size 2`.

    A mapping is JSON, and a sequence several words. True is the flag alone, and None leaves it out. So does False,
    unless flags are `negatable`: then it is `--no-flag`.
    """
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is False and negatable:
            flags.append(f"--no-{flag}")
        elif value is not None and value is not False:
            flags += [f"--{flag}", *_words(value)]
    return flags


def choose_port(configured: int) -> int:
    """`configured`, or any port of loopback if that is 0, on which nothing listens.

    Any: below the range that the kernel takes ports for outgoing connections from, because one of those could take it
    before the server listens on it; and at random, so that servers that start at the same time differ.
    Raises: EngineError when something listens there: its health would be taken for the server's.
    """
    for port in [configured] if configured else random.sample(range(15_000, 32_000), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise EngineError(f"rollout.engine.server_port={configured} is taken; 0 takes any that is free")


def _words(value: Any) -> list[str]:
    if value is True:
        return []
    if isinstance(value, Mapping):
        return [json.dumps(value)]
    return [str(word) for word in (value if isinstance(value, list | tuple) else [value])]
