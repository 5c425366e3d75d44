"""Checks of the run folder and the ports, before `slipstream up` starts anything."""

import errno
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from slipstream.buffer.identity import config_identity, require_same_identity
from slipstream.configs import RunConfig
from slipstream.configs.load import create_run_folder
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.buffer import BufferConfig, RedisConfig
from slipstream.configs.schema.learner import ParallelConfig
from slipstream.configs.schema.run import ModelConfig
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.configs.yaml_text import YamlError, read_yaml
from slipstream.learner.weights.members import BROADCAST
from slipstream.tools.report import read_summary


def finished_problems(folder: RunPaths, model: ModelConfig) -> list[str]:
    """One message if the folder holds a finished run."""
    if read_summary(folder) is None:
        return []
    trained = (
        f" (with model.path={folder.export}{' model.build=null' if model.build else ''} to train its model further)"
    )
    if model.lora is not None and model.lora.export == "adapter":
        trained = ""
    return [
        f"{folder.root} holds a finished run: add --fresh to move it aside and start over, "
        f"run.name=<other> to keep it{trained}, "
        f"or see it with `slipstream summary {folder.root}`"
    ]


def prepare_folder(config: RunConfig, *, fresh: bool) -> str:
    """Makes the run folder and writes the resolved configuration; returns a description of what was done.

    Raises: ConfigError when that can't be done, or the folder holds a run that began with incompatible settings.
    """
    folder = config.paths
    if fresh and folder.root.exists():
        aside = _move_aside(folder.root)
        create_run_folder(folder, config)
        return f"a fresh run in {folder.root} (the old folder is now {aside})"
    if not folder.config.exists():
        create_run_folder(folder, config)
        return f"a new run in {folder.root}"
    before = _written_tree(folder.config)
    with suppress(ValidationError):  # written by another release: the buffer checks the identity
        if before:
            begun = RunConfig.model_validate(before)
            require_same_identity(config, {**config_identity(begun), "env": begun.env.name})
    old, new = _flat(before), _flat(config.model_dump(mode="json"))
    changed = sorted(key for key in old.keys() | new.keys() if before and old.get(key) != new.get(key))
    create_run_folder(folder, config)
    description = f"continues the unfinished run in {folder.root}"
    changes = ", ".join(f"{key} ({old.get(key)!r} before, {new.get(key)!r} now)" for key in changed)
    return f"{description}, with another {changes}" if changed else description


def mesh_problems(parallel: ParallelConfig) -> list[str]:
    """One message if the mesh has more than the one rank that `slipstream up` starts."""
    given = ", ".join(f"{axis}={size}" for axis, size in parallel if size is not None and size > 1)
    if not given:
        return []
    return [
        f"learner.parallel: {given} needs several ranks, but `slipstream up` starts one; remove it, or start the "
        "processes yourself, the learner with torchrun (docs/parallelism.md)"
    ]


def port_problems(redis: RedisConfig, buffer: BufferConfig, weights: WeightsConfig) -> list[str]:
    """One message for each address that a process of the run on this machine could not listen on."""
    problems: list[str] = []
    taken: dict[int, str] = {}
    for key, host, port in needed_ports(redis, buffer, weights):
        if port in taken:
            problems.append(f"{key}: port {port} is also {taken[port]}; give each its own")
            continue
        taken[port] = key
        # With buffer.bind alone changed, clients would connect to the old endpoint, perhaps another run's buffer.
        remedy = "another port, in buffer.endpoint too" if key == "buffer.bind" else "another port"
        problem = _listen_problem(host, port, remedy)
        if problem:
            problems.append(f"{key}: {problem}")
    return problems


def needed_ports(redis: RedisConfig, buffer: BufferConfig, weights: WeightsConfig) -> list[tuple[str, str, int]]:
    """`(configuration key, host, port)` of every TCP port that a process started by `slipstream up` listens on."""
    ports: list[tuple[str, str, int]] = []
    if redis.url is None:
        ports.append(("redis.port", "127.0.0.1", redis.port))
    bind = urlsplit(buffer.bind)
    if bind.scheme == "tcp" and bind.port is not None:
        host = bind.hostname or "127.0.0.1"
        ports.append(("buffer.bind", "0.0.0.0" if host == "*" else host, bind.port))
    ports.append(("weights.control_port", weights.bind, weights.control_port))
    broadcasts = weights.transport in {"auto", *BROADCAST}
    if broadcasts:
        ports.append(("weights.store_port", weights.bind, weights.store_port))
    if broadcasts or weights.transport == "stream":
        ports.append(("weights.stream_port", weights.bind, weights.stream_port))
    return ports


def _listen_problem(host: str, port: int, remedy: str) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Without it a port whose last connections are still in TIME_WAIT would look busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return (
                    f"port {port} on {host} is busy; stop the process that listens there (`ss -ltnp 'sport = :{port}'` "
                    f"names it) or choose {remedy}"
                )
            return f"can't listen on {host}:{port}: {error.strerror or error}"
    return None


def _move_aside(root: Path) -> Path:
    """Renames a folder to the first free `<name>.<n>`. Raises: ConfigError when that can't be done."""
    number = 1
    while (aside := root.with_name(f"{root.name}.{number}")).exists():
        number += 1
    try:
        return root.rename(aside)
    except OSError as error:
        raise ConfigError(f"{root} can't be renamed to {aside}: {error.strerror}; move it yourself") from None


def _written_tree(file: Path) -> dict[str, Any]:
    """The content of the written configuration; empty if a full disk left an empty file.

    Raises: ConfigError when the file is no configuration.
    """
    try:
        tree = read_yaml(file.read_text(encoding="utf-8")) or {}
    except (YamlError, UnicodeDecodeError):
        tree = None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} is no configuration; delete it to continue the run with the one that you name")
    return tree


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by their dotted key path."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        leaves.update(inner)
    return leaves
