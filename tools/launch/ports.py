"""Looks, before anything is started, whether the ports of a run are free."""

import errno
import socket
from urllib.parse import urlsplit

from slipstream.configs import RunConfig
from slipstream.learner.weights.members import BROADCAST


def port_problems(config: RunConfig) -> list[str]:
    """One line for each address that this machine's processes of the run could not listen on."""
    problems: list[str] = []
    taken: dict[int, str] = {}
    for key, host, port in needed_ports(config):
        if port in taken:
            problems.append(f"{key}: port {port} is also {taken[port]}; give each its own")
            continue
        taken[port] = key
        # The run's own processes would go on asking the old one, where another run's buffer may listen.
        other = "another port, in buffer.endpoint too" if key == "buffer.bind" else "another port"
        reason = _why_not_free(host, port, other=other)
        if reason:
            problems.append(f"{key}: {reason}")
    return problems


def needed_ports(config: RunConfig) -> list[tuple[str, str, int]]:
    """`(configuration key, host, port)` of every TCP port that `slipstream up` makes a process listen on."""
    weights = config.weights
    ports = [("weights.control_port", weights.bind, weights.control_port)]
    grouped = weights.transport in {"auto", *BROADCAST}
    if grouped:
        ports.append(("weights.store_port", weights.bind, weights.store_port))
    if grouped or weights.transport == "stream":
        ports.append(("weights.stream_port", weights.bind, weights.stream_port))
    bind = urlsplit(config.buffer.bind)
    if bind.scheme == "tcp" and bind.port is not None:
        host = bind.hostname or "127.0.0.1"
        ports.insert(0, ("buffer.bind", "0.0.0.0" if host == "*" else host, bind.port))
    if config.redis.url is None:
        ports.insert(0, ("redis.port", "127.0.0.1", config.redis.port))
    return ports


def _why_not_free(host: str, port: int, *, other: str) -> str | None:
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
                    f"port {port} on {host} is busy; stop what listens there (`ss -ltnp 'sport = :{port}'` "
                    f"names it) or choose {other}"
                )
            return f"can't listen on {host}:{port}: {error.strerror or error}"
    return None
