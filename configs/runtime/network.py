"""Network addresses: formatting, loopback checks, name resolution, and the interface that gloo and NCCL use."""

import ipaddress
import os
import socket
from urllib.parse import urlsplit


def tcp_address(host: str, port: int) -> str:
    """A ZeroMQ address: `tcp://127.0.0.1:5556`, `tcp://[::1]:5556`."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """True if `host` is on the loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_local_address(address: str) -> bool:
    """True if a ZeroMQ address is on loopback, `ipc://` or `inproc://`."""
    parts = urlsplit(address)
    return parts.scheme != "tcp" or is_loopback(parts.hostname or "")


def resolution_error(address: str) -> str:
    """Suffix for an error about a ZeroMQ address whose host name can't be resolved; empty if it can."""
    host = urlsplit(address).hostname
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        return f" (the name {host} can't be resolved: {error.strerror})"
    return ""


def use_loopback_interface(bind: str) -> None:
    """Makes gloo and NCCL use the loopback interface if `bind` is on it, unless the user has chosen another.

    Ranks that torchrun has started on several hosts reach each other through another.
    """
    on_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if on_one_host and is_loopback(bind):
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
