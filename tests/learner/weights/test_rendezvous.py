"""Whoever breaks off a transfer group is heard from the moment on at which it is begun."""

import socket

import pytest

from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.transports import Rendezvous
from tests.conftest import free_port


def test_abort_before_gather_ends_gather() -> None:
    rendezvous = Rendezvous(WeightsConfig(store_port=free_port(), deadline_s=60.0))
    try:
        rendezvous.begin()
        rendezvous.abort()
        with pytest.raises(TransferError):
            rendezvous.gather(1, 2)
        rendezvous.begin()
        rendezvous.gather(2, 1)
    finally:
        rendezvous.close()


def test_busy_store_port_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = WeightsConfig(store_port=other.getsockname()[1])
        with pytest.raises(ConfigError, match=r"weights\.store_port"):
            Rendezvous(config)
