"""Keeps libraries that choose an interface by themselves on the one that the configuration means."""

import ipaddress
import os

from slipstream.configs.schema import RunConfig


def stay_on_loopback(config: RunConfig) -> None:
    """Makes gloo use the loopback interface when the weight channel does, unless the user has chosen one."""
    try:
        loopback = ipaddress.ip_address(config.weights.bind).is_loopback
    except ValueError:
        loopback = config.weights.bind == "localhost"
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
