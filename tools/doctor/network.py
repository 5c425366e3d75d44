"""Checks of the network: names, interfaces, ports of this machine, addresses of others, and what other hosts reach."""

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from slipstream.configs import RunConfig
from slipstream.configs.paths import is_run_locked
from slipstream.configs.runtime.network import is_loopback
from slipstream.tools.doctor.findings import Finding, error, warning
from slipstream.tools.doctor.hosts import HostError, ask
from slipstream.tools.doctor.probe import reach
from slipstream.tools.launch.ports import is_confined, needed_ports, port_problems

LOOKUP_S = 10.0
SLOW_LOOKUP_S = 0.5
CONNECT_S = 3.0
SKEW_S = 1.0
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Address:
    """An address at which processes of a run reach another one.

    Attributes:
        key: names it in the configuration.
        bind: host and port on which that process listens; None where the configuration does not name it.
        bind_key: names `bind` in the configuration.
    """

    key: str
    host: str
    port: int
    bind: tuple[str, int] | None = None
    bind_key: str = ""

    @property
    def text(self) -> str:
        """Key, host and port."""
        return f"{self.key} {self.host}:{self.port}"


def network_findings(config: RunConfig | None) -> Iterator[Finding]:
    """Names and interfaces of this host, and the addresses of a run."""
    own = socket.gethostname()
    yield name("own name", own, remedy=f"put {own} into /etc/hosts (docs/hosts.md)")
    yield from interfaces(config)
    if config is None:
        return
    yield from _addresses(config)
    if config.security.keys is None and not is_confined(config.buffer, config.weights):
        remedy = "`slipstream keys new FOLDER`, and security.keys=FOLDER on every host (docs/security.md)"
        yield warning("keys", "whoever reaches the ports may take part, and read what is sent", remedy)


def addresses(config: RunConfig) -> list[Address]:
    """The TCP addresses of a run: of an external Redis, of the buffer and the learner."""
    listening = {key: (host, port) for key, host, port in needed_ports(config) if key != "redis.port"}
    found = []
    redis = urlsplit(config.redis.url or "")
    if redis.scheme in ("redis", "rediss"):
        found.append(Address("redis.url", redis.hostname or "localhost", redis.port or 6379))
    for key, bind in listening.items():
        if key == "buffer.bind":
            endpoint = urlsplit(config.buffer.endpoint)
            if endpoint.scheme == "tcp" and endpoint.port is not None:
                found.append(Address("buffer.endpoint", endpoint.hostname or "localhost", endpoint.port, bind, key))
        else:
            found.append(Address(key, config.weights.host, bind[1], bind, key))
    return found


def name(check: str, host: str, *, remedy: str) -> Finding:
    """The look-up of a host's name, and its time."""
    began = time.monotonic()
    found = _resolve(host)
    seconds = time.monotonic() - began
    if isinstance(found, str):
        return warning(check, f"{host} can't be resolved: {found}", remedy)
    value = f"{host} is {', '.join(found)}, in {seconds * 1e3:.0f} ms"
    return Finding(check, value) if seconds < SLOW_LOOKUP_S else warning(check, value, remedy)


def interfaces(config: RunConfig | None) -> Iterator[Finding]:
    """The interfaces that gloo and NCCL are to use."""
    present = [interface for _, interface in socket.if_nameindex()]
    for variable in INTERFACE_VARIABLES:
        wanted = os.environ.get(variable, "")
        names = [part.removeprefix("=") for part in wanted.split(",") if part and not part.startswith("^")]
        exact = variable.startswith("GLOO") or wanted.startswith("=")
        if names and not any(one == part or (one.startswith(part) and not exact) for part in names for one in present):
            yield error(variable, f"{wanted}: there is no such interface", f"name one of {', '.join(present)}")
        elif names:
            yield Finding(variable, wanted)
    others = [interface for interface in present if interface != "lo"]
    unnamed = [variable for variable in INTERFACE_VARIABLES if variable not in os.environ]
    if config is not None and not is_loopback(config.weights.bind) and len(others) > 1 and unnamed:
        value = f"gloo and NCCL choose among {', '.join(others)}"
        yield warning("interfaces", value, f"name the private network's in {' and '.join(unnamed)}")


def _addresses(config: RunConfig) -> Iterator[Finding]:
    """Ports on which processes of this host listen, and connections to those of others."""
    listening: list[tuple[str, str, int]] = []
    if config.redis.url is None:
        listening.append(("redis.port", "127.0.0.1", config.redis.port))
    for address in addresses(config):
        if address.key == "redis.url":  # has checks of its own
            continue
        if address.bind is None or not _is_here(address.host):
            yield reached(address, reach(address.host, address.port, CONNECT_S))
        elif is_loopback(address.bind[0]) and not is_loopback(address.host):
            key = f"{address.bind_key.partition('.')[0]}.bind"
            yield error(
                address.key, f"{address.host}, but {key} is loopback", f"set {key} to an address of the network"
            )
        else:
            listening.append((address.bind_key, *address.bind))
    ports = ", ".join(f"{key} {port}" for key, _, port in listening)
    if listening and is_run_locked(config.paths):
        yield Finding("ports", f"the run is running here: {ports}")
        return
    problems = port_problems(listening)
    for problem in problems:
        value, _, remedy = problem.partition("; ")
        yield error("ports", value, remedy or "choose another address or port")
    if listening and not problems:
        yield Finding("ports", f"free: {ports}")


def reached(address: Address, outcome: str, *, origin: str = "") -> Finding:
    """The outcome of a connection, from this host or from `origin`."""
    check, value = origin or address.key, f"{address.text if origin else f'{address.host}:{address.port}'}: {outcome}"
    if outcome == "open":
        return Finding(check, value)
    if outcome == "refused":
        return warning(check, f"{value}: the host answers, but nothing listens", "start the process there")
    remedy = f"let {address.host}'s firewall admit port {address.port}, correct the address, or start the host"
    if address.key == "redis.url":
        return warning(check, value, f"for buffer or learner there, {remedy}; rollout servers need no Redis")
    return error(check, value, remedy)


def host_findings(config: RunConfig | None, hosts: Sequence[str]) -> Iterator[Finding]:
    """Clocks of other hosts, and what they reach of the run, by ssh.

    Where a process of this host is to listen and none does, this one listens meanwhile.
    """
    targets = addresses(config) if config is not None else []
    with ExitStack() as stack:
        for address in targets:
            if address.bind is not None and _is_here(address.host):
                _listen(stack, *address.bind)
        for host in hosts:
            try:
                answer = ask(host, [(address.host, address.port, CONNECT_S) for address in targets])
            except HostError as problem:
                yield error(host, str(problem), f"let `ssh -o BatchMode=yes {host} python3 --version` succeed")
                continue
            yield clock(f"clock of {host}", answer.ahead_s, answer.uncertain_s)
            for address, outcome in zip(targets, answer.outcomes, strict=True):
                if is_loopback(address.host):
                    remedy = f"name the host of this process in {address.key.partition('.')[0]}"
                    yield error(host, f"{address.text} is {host} itself there", remedy)
                else:
                    yield reached(address, outcome, origin=host)


def clock(check: str, ahead_s: float, uncertain_s: float) -> Finding:
    """A clock against this host's."""
    value = f"{abs(ahead_s) * 1e3:,.1f} ms {'ahead' if ahead_s > 0 else 'behind'}, within {uncertain_s * 1e3:.1f} ms"
    if abs(ahead_s) - uncertain_s <= SKEW_S:
        return Finding(check, value)
    remedy = "synchronise both by NTP (chrony): logs can't be compared, and certificates may not be valid"
    return warning(check, value, remedy)


def _listen(stack: ExitStack, host: str, port: int) -> None:
    """Listens until the end of the context, unless a process does already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError):
        listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()  # the kernel accepts


def _is_here(host: str) -> bool:
    """True if a name or address is this host's."""
    found = _resolve(host)
    for address in found if isinstance(found, list) else []:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe, suppress(OSError):
            probe.bind((address, 0))
            return True
    return False


def _resolve(host: str) -> list[str] | str:
    """The addresses of a name, or the reason why there are none; waits for LOOKUP_S, as no resolver can be ended."""
    found: list[str] | str = f"no answer within {LOOKUP_S:g} s"

    def look_up() -> None:
        nonlocal found
        try:
            found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
        except OSError as problem:
            found = problem.strerror or str(problem)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(LOOKUP_S)
    return found
