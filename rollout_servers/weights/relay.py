"""Relay of a version: a rollout server serves the bytes that it holds to other rollout servers."""

import zmq

from slipstream.buffer.wire.auth import LEARNER, ROLLOUT, ServiceKeys, client_keys
from slipstream.buffer.wire.weights import protocol as w
from slipstream.buffer.wire.weights.stream import PartServer
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.network import address_towards, is_loopback, tcp_address
from slipstream.configs.schema.weights import SecurityConfig, WeightsConfig
from slipstream.rollout_servers.engines.staging import Staging

log = get_log("rollout.weights")

ANY_PORT = 0


class Relay:
    """Serves the version in staging memory, whole and as the differences that led to it.

    Clients prove the key of `security.keys` and verify the bytes by the learner's checksums. The relay's own key pair
    is new at each start; its public key reaches clients through the learner.
    """

    def __init__(self, address: str, security: SecurityConfig) -> None:
        """Listens on a free port of `address`. Raises: ConfigError."""
        own, keys = client_keys(security, ROLLOUT, service=LEARNER), None
        public = b""
        if own is not None:
            public, secret = zmq.curve_keypair()
            keys = ServiceKeys(secret=secret, clients={own.public: ROLLOUT})
        self._server = PartServer(tcp_address(address, ANY_PORT), keys=keys)
        self.endpoint = w.Relay(place=self._server.place, key=public.decode())

    def serve(self, staging: Staging) -> None:
        """Serves a version that is complete and verified."""
        self._server.parts = {str(staging.version): staging.data.numpy().data, **staging.differences}

    def withdraw(self) -> None:
        """Serves nothing; pieces that are being sent may be damaged, which checksums detect."""
        self._server.parts = {}

    def close(self) -> None:
        """Stops listening."""
        self._server.close()


def start_relay(weights: WeightsConfig, security: SecurityConfig) -> Relay | None:
    """The relay of this server; None where the configuration, or the network, allows none."""
    local = is_loopback(weights.bind)
    address = weights.bind if local else address_towards(weights.host)
    # Others may not reach a loopback address of this host.
    if not weights.relay or address is None or is_loopback(address) != local or local != is_loopback(weights.host):
        return None
    try:
        return Relay(address, security)
    except ConfigError as error:
        log.warning("versions are not relayed to other servers", reason=str(error))
        return None
