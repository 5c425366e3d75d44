"""The TCP ports of a run's processes on this machine: free ones are chosen, and busy ones refused."""

import errno
import random
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.configs import RunConfig
from slipstream.configs.load import load_config
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.network import is_local_address, is_loopback
from slipstream.configs.schema.buffer import BufferConfig, RedisConfig
from slipstream.configs.schema.run import PORT_COUNT, port_defaults
from slipstream.configs.schema.weights import TRANSPORTS, WeightsConfig

FIRST, LAST = 20_000, 32_000
"""Range of the chosen ports, below the kernel's for outgoing connections, which could take one before it is used."""
ATTEMPTS = 100


def is_confined(buffer: BufferConfig, weights: WeightsConfig) -> bool:
    """True if only processes of this machine can reach the run's: then they need no port that is known beforehand."""
    return is_local_address(buffer.bind) and is_loopback(weights.bind)


def choose_port_base(folder: RunPaths) -> int:
    """The first of consecutive free ports: those that an unfinished run in the folder had, if they are still free.

    Raises: ConfigError when none are found.
    """
    return choose_ports(PORT_COUNT, preferred=_earlier_base(folder.config))


def choose_ports(count: int, *, preferred: Sequence[int] = ()) -> int:
    """The first of `count` consecutive free ports on loopback. Raises: ConfigError when none are found."""
    candidates = [random.randrange(FIRST, LAST, PORT_COUNT) for _ in range(ATTEMPTS)]
    for base in [*preferred, *candidates]:
        if not any(_listen_error("127.0.0.1", base + offset) for offset in range(count)):
            return base
    raise ConfigError(
        f"run.port_base: no {count} consecutive free ports found between {FIRST} and {LAST}: free some (`ss -ltnp` "
        "names the processes), or set it to the first of such"
    )


def _earlier_base(file: Path) -> list[int]:
    """`run.port_base` in the configuration of an earlier start; empty without one."""
    try:
        base = load_config(file).run.port_base
    except ConfigError:  # none, or written by another release
        return []
    return [] if base is None else [base]


def port_problems(ports: Sequence[tuple[str, str, int]]) -> list[str]:
    """One message for each of the `needed_ports` that a process could not listen on."""
    problems: list[str] = []
    taken: dict[int, str] = {}
    for key, host, port in ports:
        if port in taken:
            problems.append(f"{key}: port {port} is also {taken[port]}; give each its own")
            continue
        taken[port] = key
        error = _listen_error(host, port)
        if error is None:
            continue
        if error.errno != errno.EADDRINUSE:
            problems.append(f"{key}: can't listen on {host}:{port}: {error.strerror or error}")
            continue
        # With buffer.bind alone changed, clients would connect to the old endpoint, perhaps another run's buffer.
        remedy = "another port, in buffer.endpoint too" if key == "buffer.bind" else "another port"
        problems.append(
            f"{key}: port {port} on {host} is busy; stop the process that listens there (`ss -ltnp 'sport = :{port}'` "
            f"names it) or choose {remedy}; without {key} and run.port_base a free one is chosen"
        )
    return problems


def needed_ports(config: RunConfig) -> list[tuple[str, str, int]]:
    """`(configuration key, host, port)` of every TCP port that a process started by `slipstream up` listens on."""
    redis, weights = config.redis, config.weights
    ports: list[tuple[str, str, int]] = []
    if redis.url is None:
        ports.append(("redis.port", "127.0.0.1", redis.port))
    bind = urlsplit(config.buffer.bind)
    if bind.scheme == "tcp" and bind.port is not None:
        host = bind.hostname or "127.0.0.1"
        ports.append(("buffer.bind", "0.0.0.0" if host == "*" else host, bind.port))
    ports.append(("weights.control_port", weights.bind, weights.control_port))
    late = [TRANSPORTS[transport.late] for transport in weights.possible if transport.late is not None]
    keys = dict.fromkeys(key for transport in (*weights.possible, *late) for key in transport.ports)
    return ports + [(f"weights.{key}", weights.bind, getattr(weights, key)) for key in keys]


def _listen_error(host: str, port: int) -> OSError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Without it a port whose last connections are still in TIME_WAIT would look busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def unset_ports(values: Mapping[str, object]) -> set[str]:
    """The ports that no one has set: `run.port_base`, and those that follow from it or are the schema's defaults.

    Args:
        values: a configuration's values by dotted key.
    """
    base = values.get("run.port_base")
    of_base = port_defaults(base) if isinstance(base, int) else {}
    unset = {"run.port_base"}
    for name, section in (("redis", RedisConfig), ("buffer", BufferConfig), ("weights", WeightsConfig)):
        for key in port_defaults(0)[name]:
            usual = section.model_fields[key].default
            if values.get(f"{name}.{key}", usual) in (usual, of_base.get(name, {}).get(key)):
                unset.add(f"{name}.{key}")
    return unset
